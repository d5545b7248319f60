/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# Every parameter and constant, under the name that Python uses. The only place for values. #*/
//% for alias, type in types.items()
using ${alias} = ${type};
//% endfor
//% for name, value in constants.items()
[[maybe_unused]] constexpr int ${name} = ${value};
//% endfor
