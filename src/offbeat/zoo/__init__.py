"""Networks and data for demos, tests and benchmarks; nothing in the library needs them."""

from offbeat.zoo.convnets import alexnet as alexnet
from offbeat.zoo.convnets import digits_cnn as digits_cnn
from offbeat.zoo.convnets import lenet5 as lenet5
from offbeat.zoo.convnets import vgg16 as vgg16
from offbeat.zoo.data.digits import batches as batches
from offbeat.zoo.data.digits import digits as digits
from offbeat.zoo.data.loader import Loader as Loader
from offbeat.zoo.data.sets import DATA as DATA
from offbeat.zoo.data.sets import Data as Data
from offbeat.zoo.data.sets import data_named as data_named
from offbeat.zoo.gpt import gpt as gpt
from offbeat.zoo.mlp import mlp as mlp
from offbeat.zoo.networks import NETWORKS as NETWORKS
from offbeat.zoo.networks import network as network
from offbeat.zoo.networks import network_for as network_for
from offbeat.zoo.networks import settings_of as settings_of
from offbeat.zoo.resnet import resnet as resnet
from offbeat.zoo.resnet import resnet18 as resnet18
from offbeat.zoo.resnet import wrn28_10 as wrn28_10
