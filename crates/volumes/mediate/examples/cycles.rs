//! Cost of mediation without a guest: reads of 4 KiB on a null device in this process, served by a
//! separate thread. Prints cycles to translate a command and to complete one. `cargo run --release
//! -p mediate --example cycles`
#![allow(clippy::unwrap_used)] // A measurement ends by a panic.

use std::error::Error;
use std::sync::Arc;

use controller::{Controller, ControllerConfig, NamespaceConfig};
use dma::{DmaMap, Memory, Prot};
use driver::{Device, Options};
use in_process::{Host, spawn};
use mediate::{DirectOptions, DirectQueue, Slice};
use nvme::cmd::io::RwCdw12;
use nvme::{Command, NvmOpcode};
use volume::{Io, IoOptions, NullOptions, NullVolume};

const COMMANDS: u64 = 500_000;

fn main() -> Result<(), Box<dyn Error>> {
    let volume = NullVolume::new(NullOptions {
        size: 1 << 40,
        ..NullOptions::default()
    })?;
    let made = || {
        let io = Io::new(IoOptions::default());
        let namespace = NamespaceConfig {
            nsid: 1,
            volume: Arc::new(volume),
            block_size: 512,
            read_only: false,
            nguid: [1; 16],
            zones: None,
            placement: None,
            metadata: None,
            formats: None,
            eui64: [1; 8],
            uuid: [0; 16],
        };
        let config = ControllerConfig {
            mapped_doorbells: true,
            ..ControllerConfig::default()
        };
        let controller = Controller::new(0, config, vec![namespace], &io);
        controller.map(|controller| Host::new(controller, io).unwrap())
    };
    let device = Device::open(spawn(made)?, Options::default())?;
    let slice = Slice::new(&device.namespace(1)?, 1 << 20, 1 << 20, false)?;
    let memory = Memory::anonymous(64 << 20)?;
    let _registration = device.register(&memory)?;
    let mut map = DmaMap::new();
    map.map(0, 64 << 20, Some((memory, 0)), Prot::RW)?;
    let hertz = probes::cycles_per_second();
    println!(
        "depth  translate (average, p50, p99)   complete (average, p50, p99)   in cycles of {:.0} MHz",
        hertz / 1e6
    );
    for depth in [1u64, 4, 32] {
        let mut options = DirectOptions::new(1, slice);
        options.interrupts = false;
        let mut queue = DirectQueue::reserve(&device, options)?;
        let mut read = Command::new(NvmOpcode::READ.0, 0, 1);
        read.cdw12 = RwCdw12::new().with_nlb_z(7).into_bits().into();
        let (mut begun, mut ended) = (0u64, 0u64);
        while ended < COMMANDS {
            while begun < COMMANDS && begun - ended < depth {
                let at = begun.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                read.set_slba((at >> 40) & 0xffff8);
                read.set_prps((at >> 20) & 0x3ff_f000, 0);
                queue
                    .submit(&read, &map, begun)
                    .map_err(|status| status.to_string())?;
                begun += 1;
            }
            queue.ring();
            queue.poll(&mut |_, status, _| ended += u64::from(status.is_success()));
        }
        let (t, c) = (
            queue.stats().translate.summary(),
            queue.stats().complete.summary(),
        );
        println!(
            "{depth:5}  {:7.1} {:5} {:5}             {:7.1} {:5} {:5}",
            t.average, t.p50, t.p99, c.average, c.p50, c.p99
        );
    }
    Ok(())
}
