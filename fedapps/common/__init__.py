"""What every folder uses: settings, seeds, references to outside code, errors."""
