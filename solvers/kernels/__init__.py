"""CUDA sources of the solvers, compiled at run time by ``penstock.spmv.compilation.cuda_module``."""
