"""A seeded campaign against Leyden's own programs: `make siege`, and a small one in the gate (`make siege-smoke`)."""
