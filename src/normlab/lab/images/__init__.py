"""What tasks on images share: features of images, and what a generator's samples are worth."""
