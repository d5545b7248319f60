# SPDX-License-Identifier: Apache-2.0
"""tunegen db restamp: records that outlive a rewritten source, and those that must not."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest

from tunegen import compiler, kernels, session
from tunegen.cli.main import run
from tunegen.database import Database, layers
from tunegen.errors import DatabaseError, UsageError
from tunegen.model import Limit

pytestmark = pytest.mark.nvrtc

ADDED = Path(__file__).resolve().parent / "data" / "added_kernel"
TEMPLATE, SPEC = "scale.cu.jinja", "scale.py"
HELPER = "__device__ __noinline__ float times(float a, float x) { return a * x; }\n\n"


class Workshop:
    """A kernel of one's own in a folder that can be changed, and a database of its records."""

    def __init__(self, folder, capsys):
        self.kernel = folder / "kernel"
        self.db = folder / "db"
        self.path = self.db / "sm_90" / "scale.json"
        self._capsys = capsys
        shutil.copytree(ADDED, self.kernel)

    @property
    def spec(self):
        return kernels.load(self.kernel / SPEC)

    def call(self, *words):
        """Exit code, stdout and stderr of a command with this kernel and database."""
        self._capsys.readouterr()
        code = run(["--kernel", str(self.kernel / SPEC), *words, "--db", str(self.db)])
        return code, *self._capsys.readouterr()

    def tune(self, evidence="measured"):
        """Tune, and take the prediction for a measurement."""
        words = ("tune", "scale", "--arch", "sm_90", "--problem", "4096", "--trials", "1")
        code, _, err = self.call(*words, "--evaluator", "model")
        assert code == 0, err
        self.rewrite(evidence=evidence)
        assert self.call("db", "check")[0] == 0
        return self.record

    def rewrite(self, image=(), **changes):
        """Change fields of the one record, and of its image, in the file."""
        record = self.record
        images = tuple(dataclasses.replace(i, **dict(image)) for i in record.images)
        self.path.unlink()
        Database(self.db).put(dataclasses.replace(record, images=images, **changes))

    def edit(self, old, new, name=TEMPLATE):
        text = (self.kernel / name).read_text()
        assert old in text
        (self.kernel / name).write_text(text.replace(old, new))

    @property
    def record(self):
        (record,) = (r for layer, r in Database(self.db).records() if layer == "user")
        return record

    def restamp(self):
        """The one result of a re-stamping; what it says stands in the file."""
        (result,) = session.restamp(db=self.db, specs=(self.spec,))
        assert result.record == self.record
        return result

    def refused(self):
        """Why the record stays stale, with its file as it was, and the way on."""
        before = self.path.read_bytes()
        result = self.restamp()
        assert not result.restamped
        assert self.path.read_bytes() == before
        assert session.staleness(result.record, (self.spec,))
        return result.reason, result.hint


@pytest.fixture
def shop(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Workshop(tmp_path, capsys)


def without_digests(record):
    images = tuple(dataclasses.replace(image, source_digest="") for image in record.images)
    return dataclasses.replace(record, images=images)


# --- what is kept --------------------------------------------------------------------------------


def test_a_reworded_comment_makes_nothing_stale(shop):
    shop.tune()
    shop.edit("// (n)", "// n elements")
    before = shop.path.read_bytes()
    code, out, err = shop.call("db", "restamp")
    assert (code, out) == (0, "")
    assert err == f"no stale records in {shop.db}\n"
    assert shop.path.read_bytes() == before


def test_a_renamed_variable_leaves_the_measurement_as_it_was(shop):
    old = shop.tune()
    shop.edit("first", "start")
    assert shop.call("db", "check")[0] == 3
    code, out, err = shop.call("db", "restamp")
    assert code == 0
    assert out.startswith("re-stamped: scale simple 4096 fp32 on ")
    assert out.count("\n") == 1
    assert err == f"1 re-stamped, 0 still stale in {shop.db}\n"
    assert shop.record.images != old.images
    assert without_digests(shop.record) == without_digests(old)
    assert shop.call("db", "check")[:2] == (0, "")
    assert shop.call("db", "restamp")[:2] == (0, "")


NEW = '("UNROLL", (1, 2, 4), "loads in flight"),'


def test_a_new_parameter_that_says_what_it_was_completes_the_config(shop):
    old = shop.tune()
    shop.edit(NEW, f'{NEW} ("EXTRA", (0, 1), "something new", 0),', SPEC)
    shop.edit('"UNROLL": 4}', '"UNROLL": 4, "EXTRA": 0}', SPEC)
    assert "parameters of simple have changed" in session.staleness(shop.record, (shop.spec,))
    assert shop.restamp().restamped
    assert shop.record.config == {**old.config, "EXTRA": 0}
    assert shop.call("db", "check")[:2] == (0, "")


def test_a_new_parameter_that_does_not_leaves_it_stale(shop):
    shop.tune()
    shop.edit(NEW, f'{NEW} ("EXTRA", (0, 1), "something new"),', SPEC)
    reason, _ = shop.refused()
    assert reason == "no value for parameter EXTRA"


def test_other_names_in_the_cubin_are_the_same_code(shop):
    shop.edit('extern "C"', f'{HELPER}extern "C"')
    shop.edit("a * x[at]", "times(a, x[at])")
    old = shop.tune()
    shop.edit("times", "product")
    result = shop.restamp()
    assert result.restamped
    assert result.reason == "the same code"
    # The cubin on record stays the one that ran.
    assert without_digests(result.record) == without_digests(old)
    built = session.compile(
        "scale", arch="sm_90", problem="4096", params=old.config, specs=(shop.spec,)
    )
    (image,) = session.recording.images(built)
    assert image.cubin_sha256 != old.images[0].cubin_sha256


def test_a_record_without_finals_keeps_its_own_limits(shop):
    record = shop.tune()
    own = Limit("N", "equal", 4096)
    shop.rewrite(limits=(*record.limits, own))
    shop.edit("first", "start")
    result = shop.restamp()
    assert result.restamped
    assert result.reason == "the very same cubin"
    assert own in result.record.limits


def test_other_options_of_the_compiler_with_the_same_code(shop, monkeypatch):
    shop.tune()
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-DUNUSED=1"))
    assert shop.restamp().restamped
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-ftz=true"))
    assert "is not what was measured" in shop.refused()[0]


# --- what is not ---------------------------------------------------------------------------------


def test_other_code_stays_stale_and_names_the_tune(shop):
    record = shop.tune()
    shop.edit("a * x[at]", "a * x[at] + 1.0f")
    before = shop.path.read_bytes()
    code, out, err = shop.call("db", "restamp")
    assert code == 3
    assert out.startswith("stale: scale simple 4096 fp32 on ")
    assert out.endswith(f": the code of scale is not what was measured ({record.command})\n")
    assert err == f"0 re-stamped, 1 still stale in {shop.db}\n"
    assert shop.path.read_bytes() == before
    assert shlex.split(record.command)[3:5] == ["tune", "scale"]


def test_another_nvrtc_cannot_tell(shop):
    shop.tune()
    shop.rewrite(nvrtc="13.0.1")
    shop.edit("first", "start")
    reason, hint = shop.refused()
    assert "NVRTC 13.0.1" in reason
    assert compiler.nvrtc_version() in reason
    assert hint == "pip install 'nvidia-cuda-nvrtc==13.0.1'"
    shop.rewrite(nvrtc=compiler.nvrtc_version())
    assert shop.restamp().restamped


def test_without_a_code_digest_only_the_very_cubin_will_do(shop):
    record = shop.tune()
    shop.edit("first", "start")
    shop.rewrite(image={"code_sha256": "", "cubin_sha256": "0" * 64})
    assert "is not what was measured" in shop.refused()[0]
    shop.rewrite(image={"cubin_sha256": record.images[0].cubin_sha256})
    assert shop.restamp().restamped


@pytest.mark.parametrize("fact", ["registers", "spill_bytes"])
def test_other_resources_are_another_kernel(shop, fact):
    record = shop.tune()
    shop.edit("first", "start")
    shop.rewrite(image={fact: getattr(record.images[0], fact) + 1})
    assert f"{fact} today" in shop.refused()[0]


def test_a_plan_with_other_shared_memory(shop):
    shop.tune()
    shop.edit("first", "start")
    shop.edit("(c.THREADS, 1, 1), arguments)", "(c.THREADS, 1, 1), arguments, 1024)", SPEC)
    assert shop.refused()[0] == "scale has 1024 shared_bytes today, and had 0"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"at_most", (2**31 - 1) * c', '"at_most", 2**20 + 0 * c', "N at most 1048576 now"),
        (
            "lambda c, p: (model.Limit(",
            'lambda c, p: (model.Limit("x", "multiple_of", 16), model.Limit(',
            "x a multiple of 16 now",
        ),
        ("limits=lambda c, p: (model", "limits=lambda c, p: () and (model", "no longer is"),
    ],
)
def test_other_limits_are_no_longer_those_of_the_record(shop, old, new, said):
    shop.tune()
    shop.edit("first", "start")
    shop.edit(old, new, SPEC)
    assert said in shop.refused()[0]


def test_a_configuration_that_became_illegal(shop):
    record = shop.tune()
    shop.edit("first", "start")
    threads = record.config["THREADS"]
    broken = f'model.Constraint("too many threads", lambda c: c.THREADS != {threads})'
    shop.edit("(divides,)", f"(divides, {broken})", SPEC)
    assert shop.refused() == ("too many threads", record.command)


def test_a_changed_parameter(shop):
    record = shop.tune()
    shop.edit('("UNROLL", (1', '("DEPTH", (1', SPEC)
    shop.edit("c.UNROLL", "c.DEPTH", SPEC)
    reason, hint = shop.refused()
    assert "UNROLL" in reason
    assert hint == record.command


def test_another_target(shop):
    shop.tune()
    shop.edit("first", "start")
    shop.edit('name="simple",', 'name="simple", suffix="a",', SPEC)
    assert shop.refused()[0] == "it is compiled for sm_90a today, and was for sm_90"


def test_another_kernel(shop):
    shop.tune()
    for name, old in ((TEMPLATE, "tunegen_scale("), (SPEC, '"scale", "scale.cu'),
                      (SPEC, '"scale", (blocks')):  # fmt: skip
        shop.edit(old, old.replace("scale", "stretch", 1), name)
    assert shop.refused()[0] == "it launches stretch today, and did scale"


def test_a_source_that_does_not_compile(shop):
    record = shop.tune()
    shop.edit("long long at", "longer at")
    reason, hint = shop.refused()
    assert reason.startswith("scale does not compile for sm_90: ")
    assert hint == record.command


def test_a_prediction_is_made_again(shop):
    record = shop.tune("predicted")
    shop.edit("first", "start")
    reason, hint = shop.refused()
    assert "prediction" in reason
    assert hint == record.command


def test_a_spec_that_is_gone_names_the_way(shop):
    shop.tune()
    (result,) = session.restamp(db=shop.db)
    assert not result.restamped
    assert "--kernel FILE" in result.reason


# --- where, which and how it is said -------------------------------------------------------------


def test_one_document(shop):
    shop.tune()
    shop.edit("first", "start")
    code, out, err = shop.call("db", "restamp", "scale", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["restamped"], document["stale"]) == (1, 0)
    assert document["folder"] == str(shop.db)
    (result,) = document["records"]
    assert result["restamped"] is True
    assert result["hint"] == ""
    assert result["record"] == json.loads(shop.path.read_text())["records"][0]
    assert json.loads(shop.call("db", "restamp", "--json")[1])["records"] == []


def test_only_the_operations_named(shop):
    shop.tune()
    shop.edit("first", "start")
    assert shop.call("db", "restamp", "fill", "axpy")[:2] == (0, "")
    code, out, err = shop.call("db", "restamp", "scael")
    assert (code, out) == (2, "")
    assert "did you mean scale" in err
    with pytest.raises(UsageError):
        list(session.restamp(["scael"], db=shop.db))
    assert shop.call("db", "restamp", "fill", "scale")[1].startswith("re-stamped: ")


def test_what_is_shipped_beside_the_folder_is_not_touched(shop, tmp_path, monkeypatch):
    shop.tune()
    shop.edit("first", "start")
    shipped = tmp_path / "shipped"
    shop.db.rename(shipped)
    monkeypatch.setattr(layers.resources, "data_dir", lambda name: shipped)
    before = (shipped / "sm_90" / "scale.json").read_bytes()
    assert shop.call("db", "restamp")[:2] == (0, "")
    assert (shipped / "sm_90" / "scale.json").read_bytes() == before
    # Unless that is the folder: how those who ship records keep them.
    (result,) = session.restamp(db=shipped, specs=(shop.spec,))
    assert result.restamped
    assert (shipped / "sm_90" / "scale.json").read_bytes() != before


def test_the_installed_package_is_never_written(shop, monkeypatch):
    shop.tune()
    shop.edit("first", "start")
    before = shop.path.read_bytes()
    monkeypatch.setattr(layers, "_PACKAGE", shop.db.parent.resolve())
    with pytest.raises(DatabaseError, match="never written"):
        list(session.restamp(db=shop.db, specs=(shop.spec,)))
    assert shop.path.read_bytes() == before


def test_a_record_replaced_meanwhile_stays(shop, monkeypatch):
    newer = dataclasses.replace(shop.tune(), seed=7)
    shop.edit("first", "start")
    compile_it = compiler.NvrtcCompiler.compile

    def slowly(self, source, target):
        Database(shop.db).put(newer)
        return compile_it(self, source, target)

    monkeypatch.setattr(compiler.NvrtcCompiler, "compile", slowly)
    (result,) = session.restamp(db=shop.db, specs=(shop.spec,))
    assert not result.restamped
    assert "another process" in result.reason
    assert shop.record == newer
