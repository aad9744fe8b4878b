//! Random commands of a process that dies wherever it may, against a model of data and metadata.

use crate::metadata::world::*;
use nvme::{NvmOpcode, Status};
use protection::{Guard, StorageTag, Type};

const POINTS: [&str; 5] = [
    "controller.metadata.stored",
    "controller.metadata.kept",
    "controller.metadata.prepared",
    "controller.submit.submitted",
    "controller.record.posted",
];

/// A block: what it may have, data and metadata.
type Block = (Vec<u8>, Vec<u8>);

#[test]
fn random_commands_with_deaths_match_model() {
    let mut seed = 0x5eed_u64;
    let mut random = move |below: u64| {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (seed >> 33) % below
    };
    for layout in [
        usual(),
        layout(512, 64, Some((Type::Two, Guard::Bits16, true))),
        layout(4096, 16, Some((Type::One, Guard::Bits64, false))),
        layout(512, 16, None),
        stored(
            layout(4096, 16, Some((Type::Two, Guard::Bits64, false))),
            StorageTag::of(20),
        ),
    ] {
        let mut p = Protected::new(layout);
        p.storage = layout.protection.map_or(0, |p| 0x9_a5c3 & p.storage.mask);
        let checks = ALL | STC;
        let (block, size) = (layout.block as usize, usize::from(layout.metadata));
        let mut unwritten = vec![0; size];
        layout.unwritten(&mut unwritten);
        let mut blocks: Vec<Option<Block>> = vec![None; BLOCKS as usize];
        let mut deaths = 0;
        for step in 0..400 {
            let (slba, count) = (random(BLOCKS - 4), random(4) as u32 + 1);
            let range = slba as usize..slba as usize + count as usize;
            let before = p.h.deaths;
            if random(4) == 0 {
                crash::arm(POINTS[random(5) as usize], random(3) + 1);
            }
            let write = random(2) == 0;
            if write {
                let (data, metadata) = p.fill(step, slba, count);
                let status = p.status(NvmOpcode::WRITE, slba, count, checks);
                crash::disarm();
                let new = data.chunks(block).zip(metadata.chunks(size));
                let new = new.map(|(data, metadata)| (data.to_vec(), metadata.to_vec()));
                let new: Vec<Block> = new.collect();
                if status == Status::SUCCESS {
                    blocks[range]
                        .iter_mut()
                        .zip(new)
                        .for_each(|(to, new)| *to = Some(new));
                } else {
                    assert_eq!(status, Status::COMMAND_INTERRUPTED);
                    assert_ne!(p.h.deaths, before);
                    deaths += 1;
                    for (lba, new) in range.zip(new) {
                        // It is old or new. One that was never written has no metadata yet, so that
                        // it may be neither.
                        p.clear();
                        let status = p.status(NvmOpcode::READ, lba as u64, 1, checks);
                        if status != Status::SUCCESS {
                            assert!(blocks[lba].is_none(), "{lba}: {status:?}");
                            p.put(&new.0, &new.1);
                            let again = p.status(NvmOpcode::WRITE, lba as u64, 1, checks);
                            assert_eq!(again, Status::SUCCESS);
                            blocks[lba] = Some(new);
                            continue;
                        }
                        let found = p.got(1);
                        if found == new {
                            blocks[lba] = Some(new);
                        }
                    }
                }
            }
            crash::disarm();
            p.clear();
            let status = p.status(NvmOpcode::READ, slba, count, checks);
            assert_eq!(status, Status::SUCCESS);
            let (data, metadata) = p.got(count);
            let found = data.chunks(block).zip(metadata.chunks(size));
            for ((data, metadata), lba) in found.zip(slba as usize..) {
                let zeroes = (vec![0; block], unwritten.clone());
                let (wanted, beside) = blocks[lba].as_ref().unwrap_or(&zeroes);
                assert_eq!((data, metadata), (&wanted[..], &beside[..]), "{lba}");
            }
        }
        assert!(deaths > 5, "{deaths}");
    }
}
