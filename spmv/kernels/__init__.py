"""CUDA sources, compiled at run time by ``penstock.spmv.cuda_module``."""
