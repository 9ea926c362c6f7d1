"""What compilers say of kernels and steps for chips that are not here: bundles of TPUs, SASS and buffers of GPUs."""
