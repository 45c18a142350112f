"""CUDA sources of the streaming layer, compiled at run time by ``penstock.spmv.compilation.cuda_module``."""
