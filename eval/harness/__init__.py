"""What the evaluation commands are made of: options, protocol, results, streams, systems and variants."""
