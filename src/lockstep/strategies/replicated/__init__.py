"""The strategies under which each rank holds the whole model while a step computes.

none    single_process                              one rank
dp      dp                                          one process, which divides each micro-batch between devices
ddp     ddp ── ddp_reducer                          gradients are summed while the backward pass goes on
└──── compression, powersgd                ... or something smaller than gradients
zero    zero ──► ddp                                as ddp, with optimizer state divided between ranks
auto    auto ──► ddp, zero or fsdp                  the first that fits
"""
