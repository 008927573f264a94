"""What a decoder layer does beside its matrix products, on a CPU: in C++ built on the user's
machine at first use, and in plain torch."""
