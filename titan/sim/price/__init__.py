"""Price kernels and transfers on a hardware."""
