"""Ways of gradients that ordinary ZeRO-3 does not have."""
