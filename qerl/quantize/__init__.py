"""From a 16- or 32-bit checkpoint to an NVFP4 one."""
