"""Serving collections of the original package. Names only: torch.export and its CUDA library are not here."""

from dynamicemb.unavailable import unavailable_class, unavailable_function

_INSTEAD = "serve a dump with `embstore.serving`, or call the trained model after eval()"
InferenceEmbeddingCollection = unavailable_class("InferenceEmbeddingCollection", __name__, _INSTEAD)
create_inference_embedding_collection = unavailable_function(
    "create_inference_embedding_collection", _INSTEAD
)
apply_inference_embedding_collection = unavailable_function("apply_inference_embedding_collection", _INSTEAD)
