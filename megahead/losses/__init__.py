"""The mathematics of the loss: candidates, their biases and scores, and the softmax over them."""
