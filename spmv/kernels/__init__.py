"""CUDA sources, compiled at run time by ``penstock.spmv.compilation.cuda_module``."""
