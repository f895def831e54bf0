"""Shared by visual question answering and captioning: regions of images, the images themselves, and a generated world.

    features.py   `Regions`, the features of the regions of many images, read from the usual file formats
    images.py     `ImageSource`, the pictures in a folder or a tar file
    ids.py        `positions`, the only place that pairs annotations with features; mismatches are errors
    shapes.py     `make_shapes_world`, colored shapes with questions, disagreeing annotators and five captions per image
    annotations.py  `Question`, one question with the answers of its annotators
    overlay.py    `plot_overlay`, attention over an image
    extract.py    features of your own images from a pretrained backbone (`bayesattn features`)

A captioning recipe uses it like this:

    regions = load_grid_features(data / "flickr8k" / "resnet50_7x7_pca512")     # names, 49 regions per image, 7 × 7 grid
    chosen = positions(image_names, regions.names, what="captions", where="features")   # raises where an id is missing
    values, mask = regions.gather(chosen[indices])          # float32 (b, r, d) and True where there is a region

    images = ImageSource(data / "flickr8k" / "images_128x128_q75.tar")
    image = images.read("1000268201_693b08cb0e.jpg")        # uint8 (height, width, 3); corrupt or missing: ValueError

    world = make_shapes_world(500, seed=0)                  # world.names, .images, .regions, .captions, .questions

and draws its attention, one column per word (Figure 1 of the paper), with

    plot_overlay(image, {"prior": psi, "mean": mean, "std": std}, grid=regions.grid, columns=words)

where every map is (words, regions); a map with one row, such as the prior that all words share, is drawn once.
"""
