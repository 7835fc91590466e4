import numpy as np

from optpipe.models.inputs.synthetic import SMALLEST_VOCABULARY, make_synthetic_image, make_synthetic_tensor


def test_a_seed_gives_the_same_tensor_and_another_seed_another():
    first, again, other = (make_synthetic_tensor((2, 3, 32, 32), seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_rows_of_a_batch_differ_and_are_normalized():
    values = make_synthetic_tensor((4, 3, 64, 64))
    assert values.dtype == np.float32
    assert not np.array_equal(values[0], values[1])
    assert abs(values.mean()) < 1e-3
    assert abs(values.std() - 1) < 0.05


def test_pictures_have_more_low_than_high_frequencies():
    power = np.abs(np.fft.rfft2(make_synthetic_tensor((1, 1, 128, 128))[0, 0])) ** 2
    assert power[1:8, 1:8].mean() > 20 * power[40:60, 40:60].mean()


def test_integers_are_token_like_and_fit_their_type():
    assert make_synthetic_tensor((2, 16), np.int64).max() < SMALLEST_VOCABULARY
    assert make_synthetic_tensor((2, 16), np.int8).min() >= 0


def test_other_shapes_are_standard_normal():
    assert abs(make_synthetic_tensor((400, 10)).std() - 1) < 0.05
    assert make_synthetic_tensor((0, 3, 8, 8)).shape == (0, 3, 8, 8)


def test_a_picture_is_eight_bit_rgb_down_to_one_pixel():
    assert make_synthetic_image(1, 1).shape == (1, 1, 3)
    assert make_synthetic_image(30, 50).dtype == np.uint8
