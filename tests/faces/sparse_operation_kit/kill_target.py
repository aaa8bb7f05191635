"""A trainer to be killed, started by forked_trainers.py; it says "dump N" before it begins dump N.

TensorFlow is imported once and used only by the trainers, since importing takes longer than all else here.
Every step subtracts 1 from the velocity and adds the velocity to the row, so after n steps all velocities are
-n and all rows -n (n + 1) / 2, exactly. A trainer goes on from the dump that the last one left.
"""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

import sparse_operation_kit as sok

ROWS, DIM = 20_000, 16


def main(folder):
    sok.init("single")
    dynamic = sok.DynamicVariable(dimension=DIM, name="dynamic", initializer="zeros")
    static = sok.Variable(tf.zeros((ROWS, DIM)), name="static")
    wrapper = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0, momentum=1.0))
    if folder.exists():
        sok.load(folder, [dynamic, static], wrapper)
    else:
        sok.assign(dynamic, tf.range(ROWS, dtype=tf.int64), tf.zeros((ROWS, DIM)))
    ones = tf.IndexedSlices(tf.ones((ROWS, DIM)), tf.range(ROWS, dtype=tf.int64))
    while True:
        wrapper.apply_gradients([(ones, dynamic), (ones, static)])
        print("dump", int(wrapper.iterations), flush=True)
        sok.dump(folder, [dynamic, static], wrapper)
