//! Random writes and copies of a process that dies wherever it may, against a model of data and
//! metadata.

use crate::metadata::world::*;
use nvme::{NvmOpcode, Status};
use protection::{Guard, Type};

const POINTS: [&str; 4] = [
    "controller.metadata.stored",
    "controller.metadata.kept",
    "controller.submit.submitted",
    "controller.record.posted",
];

/// A block: its data and metadata.
type Block = (Vec<u8>, Vec<u8>);

fn block(p: &mut Protected, lba: u64) -> Block {
    p.read(lba, 1, GUARD)
}

#[test]
fn random_copies_with_deaths_match_model() {
    let mut seed = 0xc0de_u64;
    let mut random = move |below: u64| {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (seed >> 33) % below
    };
    for (layout, format) in [
        (usual(), 0),
        (layout(512, 64, Some((Type::Two, Guard::Bits16, true))), 0),
        (layout(4096, 16, Some((Type::One, Guard::Bits64, false))), 1),
        (layout(512, 16, None), 0),
    ] {
        let mut p = Protected::new(layout);
        let protected = layout.protection.is_some();
        // All blocks were written once: what a write of one that was not leaves is not known.
        let mut blocks: Vec<Block> = Vec::new();
        for lba in 0..BLOCKS {
            let both = p.written(lba, lba, 1);
            blocks.push(both);
        }
        let (mut deaths, mut copies) = (0, 0);
        for step in 0..400 {
            let before = p.h.deaths;
            let (to, count) = (random(BLOCKS - 8), random(4) + 1);
            if random(3) == 0 {
                let (data, metadata) = p.fill(1000 + step, to, count as u32);
                let status = p.status(NvmOpcode::WRITE, to, count as u32, ALL);
                assert_eq!(status, Status::SUCCESS);
                let (len, size) = (layout.block as usize, usize::from(layout.metadata));
                let new = data.chunks(len).zip(metadata.chunks(size));
                let places = blocks.iter_mut().skip(to as usize);
                places
                    .zip(new)
                    .for_each(|(at, (data, metadata))| *at = (data.to_vec(), metadata.to_vec()));
                continue;
            }
            let ranges: Vec<From> = (0..count)
                .map(|_| from(random(BLOCKS - 2), random(2) + 1))
                .collect();
            let all: u64 = ranges.iter().map(|range| range.blocks).sum();
            let meets = |r: &From| r.slba < to + all && to < r.slba + r.blocks;
            let made = protected && random(2) == 0;
            let prinfo = if made {
                [PRACT | GUARD, PRACT]
            } else {
                [GUARD, GUARD]
            };
            if random(3) == 0 {
                crash::arm(POINTS[random(4) as usize], random(3) + 1);
            }
            let command = p.copy(format, to, prinfo, &ranges);
            let (status, failed) = p.copied(command);
            crash::disarm();
            if ranges.iter().any(meets) {
                let overlaps = (Status::OVERLAPPING_IO_RANGE, 0);
                assert!((status, failed) == overlaps || p.h.deaths != before);
                continue;
            }
            let sources = ranges.iter().flat_map(|r| r.slba..r.slba + r.blocks);
            let new: Vec<Block> = sources
                .zip(to..)
                .map(|(lba, at)| {
                    let (data, mut metadata) = blocks[lba as usize].clone();
                    if made {
                        p.protect(&data, &mut metadata, at);
                    }
                    (data, metadata)
                })
                .collect();
            copies += 1;
            let ends = status == Status::SUCCESS;
            if !ends {
                assert_eq!(status, Status::COMMAND_INTERRUPTED);
                assert_ne!(p.h.deaths, before);
                deaths += 1;
            }
            // Each is new, or old where the command did not end well.
            for (new, lba) in new.into_iter().zip(to..) {
                let found = block(&mut p, lba);
                let old = &blocks[lba as usize];
                assert!(found == new || !ends && found == *old, "{lba}");
                blocks[lba as usize] = found;
            }
        }
        for lba in 0..BLOCKS {
            assert!(block(&mut p, lba) == blocks[lba as usize], "{lba}");
        }
        assert!(deaths > 5 && copies > 100, "{deaths} {copies}");
    }
}
