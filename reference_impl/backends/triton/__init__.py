"""The fast backend: `kernels` holds the Triton kernels, `backend` launches them."""
