"""torchvision's faces over a store, and the reader that serves them."""
