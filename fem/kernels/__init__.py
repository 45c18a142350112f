"""CUDA sources of the generator, compiled at run time by ``penstock.spmv.compilation.cuda_module``."""
