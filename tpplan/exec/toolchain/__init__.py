"""The door to CUDA's toolchain: nothing else in ``tpplan`` imports numba, llvmlite, or the ``cuda`` packages.

``language`` has what kernels are written in, ``kernel_cache`` compiles and loads them, and ``bindings`` has the driver
and the runtime. ``torch_shims`` is the same for what torch does not document.
"""
