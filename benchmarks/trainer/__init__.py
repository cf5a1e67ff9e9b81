"""How quickly a volunteer trains, beside a plain loop for the same model."""
