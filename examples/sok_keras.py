"""A Keras model whose embedding has a row for any id: `model.fit` with a train step of its own.

    python examples/sok_keras.py

Keras trains the dense variables; the rows are trained by sok.OptimizerWrapper from the same tape.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import sparse_operation_kit as sok


class Embedding(tf.keras.layers.Layer):
    """Sums the vectors of the ids of a sample."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.table = sok.DynamicVariable(dimension=dim, initializer="random")

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.nn.embedding_lookup(self.table, ids), axis=1)


class Regression(tf.keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = Embedding(8), tf.keras.layers.Dense(1)
        self.row_optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05))

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return self.dense(self.embedding(ids))

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        ids, labels = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=labels, y_pred=self(ids, training=True))
        table = self.embedding.table
        of_rows, *of_dense = tape.gradient(loss, [table, *self.trainable_variables])
        self.optimizer.apply_gradients(zip(of_dense, self.trainable_variables, strict=True))
        self.row_optimizer.apply_gradients([(of_rows, table)])
        return {"squared_error": loss}


def main() -> tuple[Regression, np.ndarray, dict[str, list[float]]]:
    sok.init("single")
    rng = np.random.default_rng(0)
    tf.keras.utils.set_random_seed(0)
    ids = rng.integers(-(2**62), 2**62, (64, 3))
    labels = rng.normal(size=(64, 1)).astype(np.float32)
    model = Regression()
    # XLA cannot call the engine, hence jit_compile=False.
    model.compile(optimizer=tf.keras.optimizers.Adam(0.05), loss="mse", jit_compile=False)
    history = model.fit(ids, labels, epochs=12, batch_size=32, verbose=0).history
    first, last = history["squared_error"][0], history["squared_error"][-1]
    print(f"squared error {first:.4f} -> {last:.4f} with {int(model.embedding.table.size[0])} rows")
    return model, ids, history


if __name__ == "__main__":
    main()
