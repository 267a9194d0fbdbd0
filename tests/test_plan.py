"""Where a transform is cut, and what the plan says about it."""

from __future__ import annotations

import pickle
from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

from fastdata import Views, plan_transform
from fastdata.pixels.plan import TransformPlan
from fastdata.pixels.resize import Resize
from fastdata.pixels.split import leading_transforms, split_transform
from fastdata.pixels.transform_keys import describe_transforms
from fresh import Interpreters

NORM = ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


class MyFlip(v1.RandomHorizontalFlip):
    """A user's own class."""


def names(steps: tuple[Any, ...]) -> list[str]:
    return [type(step).__name__ for step in steps]


def parts(plan: TransformPlan) -> tuple[list[str], list[str], list[str]]:
    return (
        names(plan.prepare),
        names(plan.batched),
        names(plan.per_sample),
    )


def image(height: int = 5, width: int = 6) -> Image.Image:
    return Image.fromarray(np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3))


@pytest.mark.parametrize("api", [v1, v2], ids=["v1", "v2"])
def test_usual_training_transform(api: Any) -> None:
    """Resize is prepared with the user's own object, the rest are batch ops, nothing is left per sample."""
    resize = api.Resize(8)
    tensor = api.ToTensor() if api is v1 else v2.ToImage()
    convert = [] if api is v1 else [v2.ToDtype(torch.float32, scale=True)]
    plan = plan_transform(
        api.Compose(
            [
                resize,
                api.RandomCrop(4, padding=1),
                api.RandomHorizontalFlip(),
                tensor,
                *convert,
                api.Normalize(*NORM),
            ]
        )
    )
    assert plan.prepare == (resize,)
    assert plan.per_sample == ()
    assert plan.is_batched
    assert plan.obstacle is None


def test_none_and_single_and_sequential_and_nested() -> None:
    """None has no step; a single transform, Sequential and nested Compose are flattened."""
    assert parts(plan_transform(None)) == ([], [], [])
    assert parts(plan_transform(v1.ToTensor())) == ([], ["ToTensor"], [])
    nested = v1.Compose(
        [v1.Compose([v1.Resize(4)]), torch.nn.Sequential(v1.CenterCrop(3), v1.RandomVerticalFlip())]
    )
    assert parts(plan_transform(nested)) == (["Resize", "CenterCrop"], ["RandomVerticalFlip"], [])


def test_form_changes_are_prepared_only_before_more_geometry() -> None:
    """ToImage before Resize is prepared, ToImage after it is a batch op, since uint8 is stored either way."""
    early = plan_transform(v2.Compose([v2.ToImage(), v2.Resize(4), v2.RandomHorizontalFlip()]))
    assert parts(early) == (["ToImage", "Resize"], ["RandomHorizontalFlip"], [])
    assert early.is_batched
    late = plan_transform(
        v2.Compose([v2.Resize(4), v2.ToImage(), v2.ToDtype(torch.uint8), v2.RandomHorizontalFlip()])
    )
    assert parts(late) == (["Resize"], ["ToImage", "ToDtype", "RandomHorizontalFlip"], [])


def test_conversions_to_float_are_never_prepared() -> None:
    """A deterministic transform that ends in floats is stored before the conversion."""
    plan = plan_transform(v1.Compose([v1.Resize((4, 5)), v1.ToTensor(), v1.Normalize(*NORM)]))
    assert parts(plan) == (["Resize"], ["ToTensor", "Normalize"], [])


def test_unknown_step_and_all_after_it_run_per_sample() -> None:
    """From ElasticTransform on everything is the user's own object; what precedes stays a batch op."""
    steps = [
        v1.Resize(8),
        v1.RandomCrop(4),
        v1.ElasticTransform(),
        v1.RandomHorizontalFlip(),
        v1.ToTensor(),
    ]
    plan = plan_transform(v1.Compose(steps))
    assert plan.per_sample == tuple(steps[2:])
    assert parts(plan)[:2] == (["Resize"], ["RandomCrop"])
    assert not plan.is_batched
    assert plan.obstacle is not None
    assert "ElasticTransform" in plan.obstacle
    assert "is not a known batch op" in plan.obstacle


def test_known_steps_behind_an_unknown_one_are_batch_ops_again() -> None:
    """They are if the unknown step gets PIL images, and may so give some."""
    behind = [v1.RandomCrop(4), v1.ToTensor(), v1.Normalize(*NORM)]
    plan = plan_transform(v1.Compose([v1.Resize(8), MyFlip(), v1.Pad(1), MyFlip(), *behind]))
    assert plan.last is not None
    assert (len(plan.last.batched), plan.last.kind, len(plan.last.batch_ops)) == (
        3,
        "tensor",
        2,
    )
    assert plan_transform(v1.Compose([v1.ToTensor(), MyFlip(), v1.Normalize(*NORM)])).last is None
    assert split_transform(v1.Compose([MyFlip(), *behind]), obstacle="batch_ops=False").last is None


class Reference:
    """A preset as torchvision's references have them."""

    def __init__(self) -> None:
        self.transforms = v1.Compose([v1.Resize(8), v1.RandomCrop(4), v1.ToTensor()])

    def __call__(self, image: Any) -> Any:
        return self.transforms(image)


class Forward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Sequential(v2.Resize(8), v2.RandomCrop(4)), v1.ToTensor()

    def forward(self, image: Any) -> Any:
        image = self.first(image)
        return self.last(image)


def around(inner: Any) -> Any:
    return lambda image: inner(image.convert("RGB"))


@pytest.mark.parametrize(
    ("transform", "prepared"),
    [
        (Reference(), ["Resize"]),
        (Reference().__call__, ["Resize"]),
        (Forward(), ["Resize"]),
        (around(Reference()), ["RGB", "Resize"]),
        (
            v1.Compose([v1.Lambda(lambda image: image.convert("RGB")), Reference()]),
            ["RGB", "Resize"],
        ),
    ],
    ids=["preset", "method", "module", "lambda", "Lambda"],
)
def test_what_only_calls_steps_is_seen_through(transform: Any, prepared: list[str]) -> None:
    """A callable's steps are those that it calls, if that is all it does."""
    assert parts(plan_transform(transform)) == (prepared, ["RandomCrop", "ToTensor"], [])


class Chain:
    """A user's own Compose."""

    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)

    def __call__(self, image: Any) -> Any:
        for part in self.parts:
            image = part(image)
        return image


class Generator:
    """SimCLR's views, as its users write them."""

    def __init__(self, base_transform: Any, n_views: int) -> None:
        self.base_transform, self.n_views = base_transform, n_views

    def __call__(self, x: Any) -> Any:
        return [self.base_transform(x) for i in range(self.n_views)]


class Crops:
    """DINO's crops."""

    def __init__(self, first: Any, second: Any, local: Any, count: int) -> None:
        self.global_transfo1, self.global_transfo2 = first, second
        self.local_transfo, self.local_crops_number = local, count

    def __call__(self, image: Any) -> Any:
        crops = []
        crops.append(self.global_transfo1(image))
        crops.append(self.global_transfo2(image))
        for _ in range(self.local_crops_number):
            crops.append(self.local_transfo(image))  # noqa: PERF401
        return crops


class Several:
    """A user's own callable that makes several views."""

    def __init__(self, one: Any, parts: Any) -> None:
        self.one, self.parts, self.count = one, list(parts), 1

    def __call__(self, image: Any) -> Any:
        views = [part(image) for part in self.parts]
        views += [self.one(image) for _ in range(self.count)]
        return (*views, self.one(image))


class TwoCrops:
    """MoCo's pair."""

    def __init__(self, base_transform: Any) -> None:
        self.base_transform = base_transform

    def __call__(self, x: Any) -> Any:
        q = self.base_transform(x)
        k = self.base_transform(x)
        return [q, k]


class Pair:
    """VICReg's pair, of two transforms."""

    def __init__(self, first: Any, second: Any) -> None:
        self.transform, self.transform_prime = first, second

    def __call__(self, sample: Any) -> Any:
        x1 = self.transform(sample)
        x2 = self.transform_prime(sample)
        return x1, x2


def test_published_wrappers_are_seen_through() -> None:
    """The wrappers of MoCo, SimCLR, VICReg and DINO are replaced by their steps, under any names."""
    chain = Chain(v1.Resize(8), v1.RandomCrop(4))
    assert parts(plan_transform(chain)) == (["Resize"], ["RandomCrop"], [])
    one, other, local = Reference(), Reference(), Reference()
    for transform, expected, kind in (
        (TwoCrops(one), [one, one], list),
        (Generator(one, 3), [one] * 3, list),
        (Pair(one, other), [one, other], tuple),
        (Crops(one, other, local, 2), [one, other, local, local], list),
        (Several(one, [other, local]), [other, local, one, one], tuple),
    ):
        plan = plan_transform(transform)
        assert (len(plan.views), plan.views_type) == (len(expected), kind)
        crops = [view.batched[0] for view in plan.views]
        assert crops == [each.transforms.transforms[1] for each in expected]
        assert plan.is_batched


LOOKED_UP, LEADING = np.arange(256), Reference()
COUNTED = 0


class Methods:
    @classmethod
    def of_the_class(cls, image: Any) -> Any:
        return image


def careful(image: Any) -> Any:
    try:
        return LEADING(image)
    except ValueError:
        return image


def counts(image: Any) -> Any:
    global COUNTED
    COUNTED += 1
    return LEADING(image)


def shares_a_draw(image: Any) -> Any:
    cut = LEADING(image)
    return [cut, LEADING(cut)]


def looks_twice(image: Any) -> Any:
    LEADING(image)
    return LEADING(image)


def asks_for_a_class(image: Any) -> Any:
    return LEADING(image) if LEADING.__class__.__name__ == "_StandIn" else image


def refuses(image: Any) -> Any:
    raise RuntimeError


def catches_all(image: Any) -> Any:
    try:
        return LEADING(image)
    except:  # noqa: E722
        return image


def looks_at_it(image: Any) -> Any:
    return LEADING(image.rotate(image.size[0]))


def counting() -> Any:
    count = 0

    def step(image: Any) -> Any:
        nonlocal count
        count += 1
        return LEADING(image)

    return step


class Keeps(Reference):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __call__(self, image: Any) -> Any:
        self.seen.append(1)
        return self.transforms(image)


def patched(module: torch.nn.Module) -> torch.nn.Module:
    module.forward = lambda image: image  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    "transform",
    [
        lambda image: Reference()(image),
        lambda image: v1.functional.hflip(image, 1),
        lambda image, more=1: image,
        lambda *images: images,
        lambda image: LOOKED_UP.take(image),
        lambda image: LOOKED_UP.nothing(image),
        lambda image: Methods.of_the_class(image),
        lambda image: LEADING(image) if image else image,
        lambda image: [LEADING(image)] * 2,
        careful,
        counts,
        shares_a_draw,
        looks_twice,
        asks_for_a_class,
        refuses,
        catches_all,
        looks_at_it,
        counting(),
        lambda image: [LEADING, Reference()][image.mode == "L"](image),
        lambda image: [LEADING(image) for _ in range(2) if image],
        lambda image: (LEADING(image) for _ in range(2)),
        lambda image: [],
        Keeps(),
        patched(Forward()),
    ],
)
def test_what_does_more_than_to_call_steps_stays_as_it_is(transform: Any) -> None:
    """A computed value, a second argument, what catches errors, keeps something or draws once for two: the user's."""
    assert plan_transform(transform).per_sample[-1] is not None
    assert not plan_transform(transform).is_batched


def test_the_transform_of_weights_is_seen_through() -> None:
    """weights.transforms() gives the pixels of torchvision's, in batches, and the same steps each time."""
    preset = ImageClassification(crop_size=4, resize_size=6)
    plan = plan_transform(preset)
    assert parts(plan) == (
        ["Resize", "CenterCrop"],
        ["PILToTensor", "ConvertImageDtype", "Normalize"],
        [],
    )
    assert plan_transform(preset).prepare[0] is plan.prepare[0]
    stepwise = v1.Compose(
        [*plan.prepare, *split_transform(preset, obstacle="batch_ops=False").per_sample]
    )
    assert torch.equal(stepwise(image(9, 12)), preset(image(9, 12)))


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([lambda x: +x], "is not a known batch op"),
        ([MyFlip()], "is not a known batch op"),
        ([v2.ToImage(), v2.ToDtype({tv_tensors.Mask: torch.int64})], "a dict without a value"),
        ([v2.ToImage(), v2.ToDtype(torch.int32)], "converts to a dtype"),
        ([v1.ToTensor(), *[v1.Normalize((0.5,), (0.5,))] * 2], "after another Normalize"),
        ([v1.ToTensor(), v1.ConvertImageDtype(torch.float16)], "converts to a dtype"),
        ([v1.ConvertImageDtype(torch.float32)], "does not accept PIL images"),
        ([v1.Normalize(*NORM)], "does not accept PIL images"),
        ([v1.PILToTensor(), v1.Normalize(*NORM)], "does not accept uint8"),
        ([v1.PILToTensor(), v1.ToTensor()], "does not accept tensors"),
        (
            [v1.ToTensor(), v1.Normalize(*NORM), v1.CenterCrop(3)],
            "comes after Normalize, where it may have to pad",
        ),
        (
            [v1.ToTensor(), v1.Normalize(*NORM), v1.RandomCrop(3, padding=1)],
            "pads with a constant after the conversion",
        ),
        (
            [v1.ToTensor(), v1.RandomCrop(3, padding=1, fill=1)],
            "pads with a constant after the conversion",
        ),
        ([v1.ToTensor(), v1.RandomResizedCrop(3)], "comes after the conversion to floats"),
        ([v1.ToTensor(), v1.Grayscale()], "comes after the conversion to floats"),
        ([v2.RandomCrop(3, padding=1, fill={tv_tensors.Mask: 1})], "a dict without a value"),
        ([v1.RandomCrop(3, padding=1, fill=300)], "fill outside of 0 to 255"),
        (
            [v1.PILToTensor(), v1.RandomCrop(3, padding=1, fill=(1, 2, 3))],
            "fill for each channel of tensors",
        ),
        ([v1.RandomCrop(3, padding=-1)], "padding that is not supported"),
        ([v1.RandomVerticalFlip(), v1.Pad(1.5)], "padding that is not supported"),
        (
            [v2.ToImage(), v2.RandomResizedCrop(3, interpolation="lanczos")],
            "interpolation that is not",
        ),
        (
            [v2.ToImage(), v2.RandomResizedCrop(3, antialias=False)],
            "resizes tensors without antialias",
        ),
        ([v1.ToTensor(), v1.Normalize((0.5,), (0.0,))], "mean or std that is not"),
        ([v2.AugMix(interpolation=v1.InterpolationMode.BICUBIC)], "interpolation that is not"),
    ],
)
def test_unserved_steps_say_why(steps: list[Any], reason: str) -> None:
    """Each step whose effect a batch op could not reproduce stays the user's own, with its reason printed."""
    plan = plan_transform(v1.Compose(steps))
    assert plan.per_sample == (steps[-1],)
    assert reason in plan.reason
    assert reason in str(plan)


def test_views_are_prepared_by_what_all_begin_with() -> None:
    """Equal deterministic steps at the front of every view run once, even as objects of their own."""
    tail = [v1.RandomCrop(3), v1.PILToTensor()]
    views = Views(
        v1.Compose([v1.Resize(9), v1.CenterCrop(5), *tail]),
        v1.Compose([v1.Resize(9), v1.Pad(1), *tail]),
    )
    plan = plan_transform(views)
    assert names(plan.prepare) == ["Resize"]
    assert [names(view.prepare) for view in plan.views] == [["Resize"]] * 2
    assert plan.is_batched
    assert "view 1, on whole batches:     Pad(" in str(plan)
    assert len({op.at for view in plan.views for op in view.batch_ops}) == 4


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (
            v1.Compose([v1.RandomVerticalFlip(), Views(v1.ToTensor())]),
            "comes before views, which must not share a random step",
        ),
        (
            v1.Compose([Views(v1.ToTensor()), v1.Lambda(len)]),
            "makes several views, which only the last transform may do",
        ),
    ],
)
def test_unserved_views_say_why(transform: Any, reason: str) -> None:
    """Views that cannot be batches run as written, on samples that the steps all share were run on once."""
    plan = plan_transform(transform)
    assert not plan.is_batched
    assert reason in (plan.obstacle or "")
    image = Image.new("RGB", (6, 5), (9, 8, 7))
    written, planned = transform(image), plan.run_unknown(image)
    assert type(written) is type(planned)
    if isinstance(written, list):
        assert [type(view) for view in written] == [type(view) for view in planned]


def test_views_of_several_types_are_batches() -> None:
    """Each view is what its own steps make of a sample."""
    plan = plan_transform(Views(v1.ToTensor(), v2.ToImage()))
    assert plan.is_batched
    assert [view.end_kind for view in plan.views] == ["tensor", "image"]


def test_each_view_is_split_by_itself() -> None:
    """A step that is not known leaves what is before and behind it, and the other views, to whole batches."""
    known = [v1.RandomCrop(3), v1.ToTensor()]
    plan = plan_transform(
        Views(v1.Compose(known), v1.Compose([v1.RandomInvert(), MyFlip(), *known]))
    )
    assert not plan.is_batched
    assert [len(view.per_sample) for view in plan.views] == [0, 3]
    assert plan.views[1].last is not None
    assert len(plan.views[1].last.batched) == 2
    assert (plan.obstacle or "").startswith("in view 1 MyFlip")
    assert "after them, on whole batches:  RandomCrop" in str(plan)
    assert (
        plan_transform(Views(v1.RandomVerticalFlip())).obstacle
        == "in view 0 the transform ends with a PIL image"
    )


def test_no_views_are_refused() -> None:
    with pytest.raises(ValueError, match="needs one transform or more"):
        Views()


def test_commuting_geometry_after_conversion_is_known() -> None:
    """Flips, plain crops, zero padding before Normalize and mirrored padding after it stay batch ops."""
    for steps in (
        [v1.ToTensor(), v1.Normalize(*NORM), v1.RandomHorizontalFlip(), v1.RandomCrop(3)],
        [v1.ToTensor(), v1.RandomCrop(3, padding=1), v1.Normalize(*NORM)],
        [v1.ToTensor(), v1.Normalize(*NORM), v1.Pad(1, padding_mode="reflect")],
    ):
        assert plan_transform(v1.Compose(steps)).is_batched


def test_an_obstacle_leaves_the_rest_as_written() -> None:
    """With an obstacle everything after the prepare part runs as written."""
    steps = [v1.Resize(4), v1.RandomHorizontalFlip(), v1.ToTensor()]
    plan = split_transform(v1.Compose(steps), obstacle="batch_ops=False")
    assert parts(plan) == (["Resize"], [], ["RandomHorizontalFlip", "ToTensor"])
    assert "batch_ops=False" in str(plan)


def test_prepared_by_others() -> None:
    """With prepared=0 deterministic steps at the front are batch ops."""
    crop = v1.Compose([v1.CenterCrop(3), v1.RandomHorizontalFlip()])
    assert parts(split_transform(crop, prepared=0)) == (
        [],
        ["CenterCrop", "RandomHorizontalFlip"],
        [],
    )
    resize = split_transform(v1.Compose([v1.Resize(4), v1.ToTensor()]), prepared=0)
    assert parts(resize) == ([], ["Resize", "ToTensor"], [])
    assert resize.kind == "tensor"
    assert resize.prepare == ()


def test_forms_that_batch_ops_do_not_know() -> None:
    """Arrays and samples that are not uint8 go through the user's own objects; bare they are batched as they are."""
    flip = v2.RandomHorizontalFlip()
    assert split_transform(flip, form="array").per_sample == (flip,)
    assert split_transform(flip, form="tensor", dtype="float32").per_sample == (flip,)
    assert split_transform(flip, form="tensor").is_batched
    assert split_transform(None, form="array").is_batched
    assert split_transform(None, form="array").kind == "array"
    assert split_transform(v2.RandomResizedCrop(3), form="mask").obstacle is not None
    assert "gets samples of a kind that batch ops do not support" in str(
        split_transform(v1.RandomHorizontalFlip(), form="mask")
    )
    assert not split_transform(None, form="pil").is_batched


def test_plan_is_the_same_for_the_source_and_for_the_store() -> None:
    """The prepare part is the same for the form before it and for the form after it."""
    transform = v2.Compose([v2.ToImage(), v2.Resize(4), v2.RandomHorizontalFlip()])
    assert str(split_transform(transform, form="pil")) == str(
        split_transform(transform, form="tensor")
    )


def test_kind_is_what_the_next_step_would_have_had() -> None:
    """An unknown step gets a tv_tensors.Image after ToImage, a tensor after PILToTensor, else a PIL image."""

    def kind(*steps: Any) -> str:
        return plan_transform(v2.Compose([*steps, np.asarray])).kind

    assert kind(v2.ToImage()) == "image"
    assert kind(v2.PILToTensor()) == "tensor"
    assert kind(v2.RandomHorizontalFlip()) == "pil"
    assert kind(v2.ToImage(), v2.ToPureTensor()) == "tensor"


def test_sizes_may_be_the_lists_of_a_config() -> None:
    """Any sequence counts, such as OmegaConf's, which torchvision keeps as it is."""
    sides: Any = UserList([3, 4])
    steps = [v1.RandomResizedCrop(sides), v1.CenterCrop(sides), v1.ToTensor()]
    plain = [v1.RandomResizedCrop((3, 4)), v1.CenterCrop((3, 4)), v1.ToTensor()]
    assert (
        plan_transform(v1.Compose(steps)).batch_ops == plan_transform(v1.Compose(plain)).batch_ops
    )
    assert describe_transforms([v1.Resize(sides)], is_pil=True) == "resize (3, 4) bilinear"


def test_erasing_with_more_values_than_the_core_holds_runs_as_written() -> None:
    """Images may have more channels than the core has room for values."""
    step = v1.RandomErasing(value=(1.0, 2.0, 3.0, 4.0, 5.0))
    plan = split_transform(v1.Compose([step]), form="tensor", channels=5)
    assert plan.per_sample == (step,)
    assert "erases with more than 4 values" in (plan.obstacle or "")


@pytest.mark.parametrize("version", [v1, v2])
def test_resizes_and_crops_of_pil_images_have_one_text(version: Any) -> None:
    """Bilinear and bicubic resizes are identified by size and filter; other filters have another text."""

    def text(step: Any) -> str:
        return describe_transforms([step], is_pil=True)

    bicubic = version.Resize((4, 6), interpolation=version.InterpolationMode.BICUBIC)
    nearest = version.Resize(4, interpolation=version.InterpolationMode.NEAREST)
    assert text(version.Resize(4)) == text(version.Resize([4])) == text(Resize(4))
    assert text(version.Resize(4)) == "resize 4 bilinear"
    assert text(bicubic) == "resize (4, 6) bicubic"
    assert text(version.CenterCrop((3, 2))) == "centre crop (3, 2)"
    for other in (version.Resize(4, max_size=9), nearest):
        assert not text(other).startswith("resize")
    assert "centre crop" not in describe_transforms([nearest, version.CenterCrop(3)], is_pil=True)


class PlainResize:
    """Has no text of its own."""

    __torchvision_equal__ = "Resize"
    interpolation, max_size, antialias = "bilinear", None, True

    def __init__(self, size: int) -> None:
        self.size = size


def key_of(transform: Any) -> str:
    """Return the text that identifies the steps before samples are stored."""
    return describe_transforms(leading_transforms(transform), "")


def test_a_key_of_leading_steps_is_no_address() -> None:
    """Equal steps without a repr of their own have one key, wherever they lie; others have another."""
    keys = [key_of(PlainResize(size)) for size in (4, 4, 5)]
    assert keys[0] == keys[1] != keys[2]


def test_a_key_tells_leading_steps_apart() -> None:
    """Equal steps have equal keys in different objects; other arguments, another API or another order do not."""
    first = [v1.Resize(4), v1.CenterCrop(3)]
    key = key_of(v1.Compose([*first, v1.ToTensor()]))
    assert key == key_of(v1.Compose([v1.Resize(4), v1.CenterCrop(3), v1.RandomHorizontalFlip()]))
    others = (
        [v1.Resize(5), v1.CenterCrop(3)],
        [v1.CenterCrop(3), v1.Resize(4)],
        [v2.Resize(4), v2.CenterCrop(3)],
        [],
    )
    keys = {key_of(v1.Compose(steps)) for steps in others}
    assert len(keys | {key}) == 5
    assert "" in keys


@pytest.mark.parametrize("steps", [[ImageOps.exif_transpose], [PlainResize(4)]])
def test_a_key_is_the_same_in_every_process(steps: Any) -> None:
    """The key of a function, or of an object without a text of its own, depends on its contents, not on its address."""
    key = key_of(v1.Compose(steps))
    assert "0x" not in key
    others = (ImageOps.exif_transpose, PlainResize(4), PlainResize(5), v1.CenterCrop(4))
    assert [key_of(other) for other in others].count(key) == 1


def test_print_shows_the_three_parts() -> None:
    """Each step of the user stands on the line of its part."""
    plan = plan_transform(
        v1.Compose([v1.Resize(4), v1.RandomCrop(3), v1.ElasticTransform(), v1.ToTensor()])
    )
    prepare, batch_ops, per_sample, because, last = str(plan).split("\n")
    assert "Resize(size=4" in prepare
    assert "RandomCrop(size=(3, 3)" in batch_ops
    assert "ElasticTransform" in per_sample
    assert "because ElasticTransform" in because
    assert "ToTensor()" in last
    assert "one by one, because" in str(plan_transform(None))


def test_plan_pickles() -> None:
    """A plan comes back equal."""
    plan = plan_transform(v2.Compose([v2.Resize(4), v2.RandomHorizontalFlip(), v2.ToImage()]))
    again = pickle.loads(pickle.dumps(plan))
    assert str(again) == str(plan)
    assert again.kind == "image"
    assert again.batch_ops == plan.batch_ops


def test_torchvision_is_not_imported_by_the_package(fresh: Interpreters) -> None:
    """In a fresh interpreter the plan module does not bring torchvision in."""
    code = "import sys, fastdata.pixels.program; print('torchvision' in sys.modules)"
    done = fresh.run(code)
    assert done.stdout == "False\n", done.stderr
