//! Hosts that ring their doorbells in every way that hosts do, across resets.

use crate::common::*;
use controller::ControllerConfig;
use doorbell::HostBehaviour;
use driver::{Device, Doorbells, Options, QueueOptions, ShadowMemory};

const MIB: u64 = 1 << 20;

fn behaviours() -> Vec<(&'static str, Doorbells)> {
    let base = Doorbells::default();
    let with = |behaviour| Doorbells { behaviour, ..base };
    vec![
        ("standard", base),
        (
            "no shadow",
            Doorbells {
                shadow: false,
                ..base
            },
        ),
        ("linux", with(HostBehaviour::LINUX)),
        (
            "linux, stale",
            Doorbells {
                memory: ShadowMemory::Stale,
                ..with(HostBehaviour::LINUX)
            },
        ),
        (
            "barrierless, stale",
            Doorbells {
                memory: ShadowMemory::Stale,
                ..with(HostBehaviour::BARRIERLESS)
            },
        ),
        ("annex", with(HostBehaviour::ANNEX)),
        (
            "configures and rings registers",
            with(HostBehaviour::REGISTER_ONLY),
        ),
        ("always rings", with(HostBehaviour::ALWAYS_RINGS)),
        (
            "admin too",
            Doorbells {
                admin: true,
                ..base
            },
        ),
        (
            "fresh buffers",
            Doorbells {
                memory: ShadowMemory::Fresh,
                ..base
            },
        ),
    ]
}

#[test]
fn every_host_is_served_across_resets_and_queue_lifetimes() {
    for (name, doorbells) in behaviours() {
        for mapped_doorbells in [false, true] {
            let config = ControllerConfig {
                mapped_doorbells,
                ..ControllerConfig::default()
            };
            let transport = local(config, vec![namespace(1, memory(2 * MIB), 512)]);
            let device = open(
                &transport,
                Options {
                    doorbells,
                    ..Options::default()
                },
            );
            let mut model = Exerciser::new(2 * MIB, 512, 256 << 10, 17);
            // A small queue, so that it wraps often.
            let small = QueueOptions {
                depth: 5,
                ..Default::default()
            };
            let mut queue = device.queue(1, small).unwrap();
            for life in 0..4 {
                model.run(&device, &mut queue, 150, 8);
                let mut other = device.queue(1, small).unwrap();
                model.verify(&mut other);
                if life % 2 == 0 {
                    device.reset().unwrap();
                } else {
                    drop(queue);
                    queue = device.queue(1, small).unwrap();
                }
            }
            model.verify(&mut queue);
            assert_eq!(device.resets(), 2, "{name}");
            assert_eq!(
                device.shadow_buffers().is_some(),
                doorbells.shadow,
                "{name}"
            );
            assert!(device.service().unwrap().is_empty(), "{name}: events");
        }
    }
}

#[test]
fn stale_shadow_buffers_are_not_touched() {
    let transport = disk(MIB, 512);
    let doorbells = Doorbells {
        memory: ShadowMemory::Fresh,
        ..Doorbells::default()
    };
    let device = open(
        &transport,
        Options {
            doorbells,
            ..Options::default()
        },
    );
    let mut queue = device
        .queue(
            1,
            QueueOptions {
                depth: 3,
                ..Default::default()
            },
        )
        .unwrap();
    let mut model = Exerciser::new(MIB, 512, 64 << 10, 5);
    model.run(&device, &mut queue, 200, 6);
    let old = device.shadow_buffers().unwrap();
    assert!(
        old.eventidxs().to_vec().unwrap().iter().any(|&b| b != 0),
        "never used"
    );
    device.reset().unwrap();
    // A pattern that no index is, so that a write of any index shows.
    old.doorbells().fill(0xEE).unwrap();
    old.eventidxs().fill(0xEE).unwrap();
    model.run(&device, &mut queue, 400, 6);
    for page in [old.doorbells(), old.eventidxs()] {
        assert!(
            page.to_vec().unwrap().iter().all(|&b| b == 0xEE),
            "written after the reset"
        );
    }
    let new = device.shadow_buffers().unwrap();
    assert_ne!(new.doorbells().iova(), old.doorbells().iova());
    assert!(queue.counters().silent_doorbells > 0);
}

#[test]
fn driver_restart_without_shutdown_is_served() {
    // As kexec does: the old kernel's driver never shut down, the new one
    // finds the controller enabled.
    let transport = disk(MIB, 512);
    let mut model = Exerciser::new(MIB, 512, 64 << 10, 6);
    for life in 0..4 {
        let shadow = life % 2 == 0;
        let device = open(
            &transport,
            Options {
                doorbells: Doorbells {
                    shadow,
                    ..Doorbells::default()
                },
                ..Options::default()
            },
        );
        let mut queue = device.queue(1, QueueOptions::default()).unwrap();
        model.verify(&mut queue);
        model.run(&device, &mut queue, 200, 16);
        for i in 0..10 {
            queue
                .submit_read(i, 1, device.allocate(512).unwrap(), i)
                .unwrap();
        }
        queue.ring();
        // Neither the queue is deleted nor the controller shut down; the memory
        // stays, as a kernel's would.
        std::mem::forget((queue, device));
        let iova = transport
            .with(|host| {
                host.controller()
                    .dma()
                    .windows()
                    .map(|w| (w.iova, w.len))
                    .collect::<Vec<_>>()
            })
            .unwrap();
        assert!(!iova.is_empty());
        transport
            .with(move |host| {
                // The next kernel's mappings are others, at the same addresses.
                host.controller().dma_unmap_all();
                while !host.controller().dma_quiesced() {
                    host.step();
                }
            })
            .unwrap();
    }
}

#[test]
fn shadow_doorbells_save_registers() {
    let run = |shadow| {
        let volume = memory(MIB);
        let made = move || {
            Ok::<_, ()>(host(
                ControllerConfig::default(),
                vec![namespace(1, volume, 512)],
            ))
        };
        let transport = in_process::spawn(made).unwrap();
        let device: Device = open(
            &transport,
            Options {
                doorbells: Doorbells {
                    shadow,
                    ..Doorbells::default()
                },
                ..Options::default()
            },
        );
        let mut queue = device
            .queue(
                1,
                QueueOptions {
                    depth: 64,
                    interrupts: false,
                    ..Default::default()
                },
            )
            .unwrap();
        let mut model = Exerciser::new(MIB, 512, 16 << 10, 8);
        model.run(&device, &mut queue, 4000, 32);
        queue.counters()
    };
    let (with, without) = (run(true), run(false));
    assert_eq!(without.silent_doorbells, 0);
    assert!(with.silent_doorbells > 0, "{with:?}");
}
