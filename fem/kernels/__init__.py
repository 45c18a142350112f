"""CUDA sources of the generator and of meshes, compiled at run time by ``penstock.spmv.compilation.cuda_module``."""
