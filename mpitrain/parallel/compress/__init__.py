"""Less to send for a gradient: compressors, the exchange of what they make, and the proof of a user's own."""
