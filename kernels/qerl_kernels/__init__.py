"""NVFP4 kernels and operators. Use `qerl_kernels.ops`; nothing here imports `qerl`."""
