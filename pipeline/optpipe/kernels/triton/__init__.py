"""The kernels, in Triton and in Gluon; a module is imported where one of its kernels is launched."""
