"""How many ranks are worth asking for: measuring a script (`bench`), and predicting it elsewhere (`predict`)."""
