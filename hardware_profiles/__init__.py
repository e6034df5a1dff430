"""Hardware profiles: one TOML file per kind of host. This docstring is the schema.

A figure is `{ value = "80 GiB", source = "data sheet" }`: a text with a unit, and where it comes from. Link rates are
for one device (or one network port) and one direction: NVLink's 600, 900 and 1800 GB/s are the sum of both directions
and are refused; the rate of a port is in bits (`"400 Gbit/s"`), as it is sold.

    description = "one line"
    default_network = "infiniband_200g"            one of the networks below; NAME+NETWORK chooses another

    [device]
    name = "NVIDIA A100-SXM4-80GB"
    memory = {...}                                 that the driver offers           "81920 MiB"
    memory_bandwidth = {...}                       data sheet                       "2039 GB/s"
    matmul_efficiency = {...}                 *    sustained product / bf16 peak    "68.6 %"
    memory_efficiency = {...}                 *    best elementwise op / bandwidth  "90 %"
    launch = {...}                            *    host time to launch one bare op  "6 us"
    kernel = {...}                            *    shortest kernel on the device    "1.1 us"
    collective_launch = {...}                 *    host time to start a collective  "100 us"
    pipeline_action = {...}                   *    host time of an action of a pipeline, beside its blocks  "100 us"
    pipeline_transfer = {...}                 *    host time of sending or receiving once in an action      "100 us"
    host_copy_rate = {...}                    *    pinned copy from the host to each device, all at once    "43 GB/s"
    [device.sharding]                         *    host time of fully_shard, see `hardware.ShardingHost`; keys as there:
    hooks = {...}                             *    hooks, gather, reduce of a block; each also `_of_parameter`;
                                                   and optimizer_of_parameter       "120 us"
    [device.peak]                                  dense; a precision that is left out is not supported
    bf16 = {...}                                   also fp64, fp32, tf32, fp16, fp8 "312 TFLOP/s"

    [host]
    n_devices = 8
    price_per_device_hour = {...}             -                                     "1.99 USD/h"
    exposed_when_overlapped = {...}           *    beside all-reduces: (time of both together - C) / G, where C seconds
                                                   of compute take much longer than G of communication   "31 %"
    compute_exposed_when_overlapped = {...}   -    (time of both together - G) / C, where communication takes much
                                                   longer; left out: as the figure above                 "10 %"
    shards.exposed_when_overlapped = {...}    -    of ZeRO's all-gathers and reduce-scatters; left out: as that of
                                                   all-reduces
    shards.compute_exposed_when_overlapped = {...}    - likewise; left out: as the line above. All four are 1 to 99 %

    [host_link]                                    left out when a host has one device
    kind = "nvlink3"                               one of [link_kind.*] in shared.toml
    n_hosts = 18                              -    hosts that these links join, where they do not end at the host
    rate_per_device_one_direction = {...}     *    data sheet                       "300 GB/s"
    latency_per_step = {...}                  *    start-up of one step             "3.5 us"
    half_rate_size = {...}                    *    bytes a rank moves at half the achieved rate  "6.5 MiB"
    all_reduce_bus_rate = {...}               *    bus bandwidth of a large all-reduce over the host  "229 GB/s"
    all_gather_bus_rate = {...}               -    likewise of an all-gather, if it differs; all_to_all_bus_rate and
                                                   send_bus_rate of those
    multicast_all_reduce_bus_rate = {...}     -    all-reduce in the switch (NVLS); leave out where multicast is off
    drift = {...}                             -    standard deviation of times from one minute to another; widens the
                                                   intervals of steps; left out: they do not count it    "5 %"
    [host_link.all_reduce_bus_rate_of_group]  -    smaller groups, where measured
    2 = {...}
    [host_link.times]                         -    of collectives in a host, measured; other sizes lie between them,
    source = "..."                                 other groups follow the figures above
    all_gather.2 = { "64 KiB" = "9 us", ... }      by kind and group: size of the full tensor and time; also all_reduce,
                                                   reduce_scatter, all_to_all, send.2 and, as
                                                   much each way at once, sendrecv.2

    [network.my_fabric]                       -    beside those of shared.toml
    kind = "infiniband"
    ports = "8 per host"                           or "1 per device"
    rate_per_port_one_direction = {...}            data sheet, in bits              "200 Gbit/s"
    latency_per_step = {...}                                                        "10 us"
    half_rate_size_per_port = {...}                                                 "2 MiB"
    all_reduce_bus_rate_per_port = {...}           bus bandwidth of a large all-reduce / ports  "24 GB/s"
    n_hosts = 32                              -    hosts of one leaf, where tiers follow; else it joins all there are
    [[network.my_fabric.tier]]                -    what joins leaves, then what joins those, and so on outwards
    kind = "spine"
    n_domains = 16                            -    domains of the tier below that it joins; the outermost: all there are
    latency_per_step = {...}                       of a step that passes it             "12 us", between sites "5 ms"
    oversubscription = {...}                       rate of all below an uplink / rate of the uplink  "2:1"
    rate_per_uplink_one_direction = {...}          instead of it: all uplinks of one domain below    "12800 Gbit/s"

`-` may be left out: unknown stays unknown. `*` may be left out: the generic figure in `shared.toml` is taken and
marked "assumed" wherever the profile's sources are shown. All else is required. `autoplan hw validate` and the report
of a plan also name figures that are possible and that no machine is known to have (`autoplan.hardware.usual`).

Networks in shared.toml: ethernet_10g, ethernet_100g, infiniband_100g, infiniband_200g, infiniband_400g, efa_400g, and
leaf_spine_400g, an example of tiers. Rates of a network are divided by the devices of a host, so a host with one port
gives each device its share. `NAME/4` takes 4 devices of each host and leaves the others idle; what these get of ports
and uplinks is said in `autoplan.hardware.networks`.
"""
