# SPDX-License-Identifier: Apache-2.0
"""The vocabulary: frozen values, and the two protocols that tools are plugged into."""

from tunegen.model.device_class import ARCHS, DeviceClass, capability, check_arch
from tunegen.model.expr import Expr, ceil_div, evaluate, maximum, minimum
from tunegen.model.gpu import FoundGpus, GpuInfo
from tunegen.model.kernel import (
    SM_COUNT,
    Candidate,
    CompiledKernel,
    KernelDefinition,
    KernelSource,
    KernelSpec,
    Resources,
    Sizes,
)
from tunegen.model.outcome import (
    Compiler,
    Evaluator,
    Evidence,
    Measurement,
    Outcome,
    OutcomeKind,
    Trial,
)
from tunegen.model.plan import (
    GRID_LIMITS,
    Argument,
    Launch,
    LaunchPlan,
    Limit,
    TensorMap,
    formula,
)
from tunegen.model.problem import (
    ACCUMULATOR,
    DTYPE_BYTES,
    Array,
    Operation,
    Problem,
    parse_sizes,
)
from tunegen.model.record import DeviceIdentity, KernelImage, TuningRecord
from tunegen.model.space import (
    Columns,
    Config,
    ConfigTable,
    Constraint,
    Parameter,
    Point,
    Space,
    parameters,
)
from tunegen.model.work import Work

__all__ = [
    "ACCUMULATOR",
    "ARCHS",
    "DTYPE_BYTES",
    "GRID_LIMITS",
    "SM_COUNT",
    "Argument",
    "Array",
    "Candidate",
    "Columns",
    "CompiledKernel",
    "Compiler",
    "Config",
    "ConfigTable",
    "Constraint",
    "DeviceClass",
    "DeviceIdentity",
    "Evaluator",
    "Evidence",
    "Expr",
    "FoundGpus",
    "GpuInfo",
    "KernelDefinition",
    "KernelImage",
    "KernelSource",
    "KernelSpec",
    "Launch",
    "LaunchPlan",
    "Limit",
    "Measurement",
    "Operation",
    "Outcome",
    "OutcomeKind",
    "Parameter",
    "Point",
    "Problem",
    "Resources",
    "Sizes",
    "Space",
    "TensorMap",
    "Trial",
    "TuningRecord",
    "Work",
    "capability",
    "ceil_div",
    "check_arch",
    "evaluate",
    "formula",
    "maximum",
    "minimum",
    "parameters",
    "parse_sizes",
]
