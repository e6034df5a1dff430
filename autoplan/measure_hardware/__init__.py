"""Measures this host (`autoplan hw measure`), or one device without torchrun, and writes its hardware profile.

    torchrun --standalone --nproc-per-node N -m autoplan hw measure --out my_box.toml
    torchrun --standalone --nproc-per-node N -m autoplan.measure_hardware --out my_box.toml    (needs only torch)

device, links, pipeline_host_time, zero_host_time --rates, times--> measure --> measured_host --host_file--> TOML, JSON
                                                      link_fit, host_shares, nccl_log: what the times and NCCL's log say
"""
