"""How clients' samples differ from the dataset's: changes, corruptions, translations."""
