"""What a volunteer wishes of the program: keys, the layers that they come from, and the commands that show them."""
