"""Looking after modules: leading them, mirroring them, following them, keeping them for ever."""
