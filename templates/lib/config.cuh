/*# SPDX-License-Identifier: Apache-2.0 #*/
/*# Every parameter and constant, under the name that Python uses. The only place for values. #*/
//% for alias, type in types.items()
using ${alias} = ${type};
//% endfor
/*# Enumerators, since NVRTC makes a global variable in the image of each constexpr int. #*/
enum : int {
  //% for name, value in constants.items()
  ${name} = ${value},
  //% endfor
};
