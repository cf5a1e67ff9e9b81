"""Which path reads which text: features, routers, and how well they do."""
