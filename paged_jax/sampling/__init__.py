"""From logits to tokens: what a user may ask for, the state of each slot, and the draw itself."""
