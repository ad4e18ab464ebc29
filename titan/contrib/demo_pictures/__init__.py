"""Pictures that the demos of diffusion and of vision and language draw."""
