// What CUDA's headers need of their compiler: the wheel of the headers lacks this file, which comes with nvcc.
#pragma once
#define __host__
#define __device__
#define __device_builtin__
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __no_return__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __location__(a)
#define __annotate__(a)
#define __dv(v)
#define __inline__ inline
#define __forceinline__ inline
