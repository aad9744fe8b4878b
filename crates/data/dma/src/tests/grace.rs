use std::sync::{Arc, Weak};

use crate::memory::Mapping;
use crate::{Access, DmaMap, Memory, Pin, Prot, SegmentList};

/// Creates a map with one page at each of `n` page addresses, each backed by a memory of its own.
fn map_of(n: u64) -> (DmaMap, Vec<Weak<Mapping>>) {
    let mut map = DmaMap::new();
    let weak = (0..n)
        .map(|i| {
            let memory = Memory::anonymous(4096).unwrap();
            memory.write(0, &[i as u8; 4096]).unwrap();
            let weak = Arc::downgrade(&memory.0);
            map.map(i * 4096, 4096, Some((memory, 0)), Prot::RW)
                .unwrap();
            weak
        })
        .collect();
    (map, weak)
}

fn alive(weak: &Weak<Mapping>) -> bool {
    weak.strong_count() > 0
}

#[test]
fn unmap_without_commands_ends_at_once() {
    let (mut map, memory) = map_of(1);
    map.unmap(0, 4096).unwrap();
    assert!(!alive(&memory[0]));
    assert!(map.quiesced());
}

#[test]
fn unmap_waits_for_commands_before() {
    let ways: [fn(&mut SegmentList, &DmaMap); 2] = [
        |list, map| {
            list.begin(map);
            map.segments(100, 50, Access::Write, list).unwrap();
        },
        |list, map| assert!(list.begin_piece(map, 100, 50, Access::Write)),
    ];
    let ends: [fn(&mut SegmentList); 3] = [
        SegmentList::clear,
        |list| drop(std::mem::take(list)),
        // The next command finds nothing at that address.
        |list| assert!(!list.begin_piece(&DmaMap::new(), 0, 1, Access::Read)),
    ];
    let mut list = SegmentList::new();
    for begin in ways {
        for end in ends {
            let (mut map, memory) = map_of(1);
            begin(&mut list, &map);
            map.unmap(0, 4096).unwrap();
            assert!(!map.quiesced());
            assert!(alive(&memory[0]));
            assert_eq!(list.copy_from(0, &[9; 50]), 50);
            assert!(list.equals(0, &[9; 50]));
            end(&mut list);
            assert!(!alive(&memory[0]));
            assert!(map.quiesced());
        }
    }
}

#[test]
fn unmap_ignores_commands_after() {
    let (mut map, memory) = map_of(2);
    let before = map.pin();
    map.unmap(0, 4096).unwrap();
    let after = map.pin();
    assert!(!map.quiesced());
    drop(before);
    assert!(map.quiesced());
    assert!(!alive(&memory[0]));
    drop(after);
}

/// There is always a command outstanding, and each overlaps the next: only an epoch can distinguish
/// them.
#[test]
fn unmap_ends_under_steady_load() {
    let (mut map, memory) = map_of(8);
    let mut in_flight: std::collections::VecDeque<Pin> = (0..4).map(|_| map.pin()).collect();
    for i in 0..8 {
        map.unmap(i * 4096, 4096).unwrap();
        let mut steps = 0;
        while !map.quiesced() {
            assert!(alive(&memory[i as usize]));
            in_flight.push_back(map.pin());
            in_flight.pop_front();
            steps += 1;
            assert!(
                steps <= 4,
                "still waiting after every older command has completed"
            );
        }
        assert_eq!(steps, 4);
        assert!(!alive(&memory[i as usize]));
    }
}

#[test]
fn old_command_keeps_later_unmapped_memory() {
    let (mut map, memory) = map_of(3);
    let oldest = map.pin();
    map.unmap(0, 4096).unwrap();
    let middle = map.pin();
    map.unmap(4096, 4096).unwrap();
    // No pin of the present epoch: the memory still waits for the older ones.
    map.unmap(8192, 4096).unwrap();
    drop(middle);
    assert!(!map.quiesced());
    assert!(memory.iter().all(alive));
    drop(oldest);
    // The memory is released even without a call of `quiesced`.
    assert!(!memory.iter().any(alive));
    assert!(map.quiesced());
}

#[test]
fn fence_waits_for_commands_before() {
    let (mut map, memory) = map_of(1);
    map.fence();
    assert!(map.quiesced());
    let before = map.pin();
    map.fence();
    let after = map.pin();
    assert!(!map.quiesced());
    drop(after);
    assert!(!map.quiesced());
    // No memory has left the map yet. Memory unmapped now is kept for the old command only.
    assert!(
        map.segments(0, 4096, Access::Write, &mut SegmentList::new())
            .is_ok()
    );
    map.unmap_all();
    assert!(alive(&memory[0]));
    drop(before);
    assert!(!alive(&memory[0]));
    assert!(map.quiesced());
}

#[test]
fn middle_command_keeps_memory_unmapped_later() {
    let (mut map, memory) = map_of(2);
    let oldest = map.pin();
    map.unmap(0, 4096).unwrap();
    let middle = map.pin();
    map.unmap(4096, 4096).unwrap();
    drop(oldest);
    assert!(!alive(&memory[0]));
    assert!(alive(&memory[1]));
    assert!(!map.quiesced());
    drop(middle);
    assert!(map.quiesced());
    assert!(!alive(&memory[1]));
}

#[test]
fn segment_list_outlives_map() {
    let (map, memory) = map_of(2);
    let mut list = SegmentList::new();
    map.segments(0, 8192, Access::Write, &mut list).unwrap();
    drop(map);
    assert!(memory.iter().all(alive));
    let mut byte = [0];
    assert_eq!(list.copy_to(5000, &mut byte), 1);
    assert_eq!(byte, [1]);
    let mut part = SegmentList::new();
    list.slice(4096, 10, &mut part);
    drop(list);
    assert!(part.equals(0, &[1; 10]));
    drop(part);
    assert!(!memory.iter().any(alive));
}

/// The chain of epochs that one stuck command holds is undone without recursion.
#[test]
fn stuck_command_under_many_unmaps_does_not_exhaust_stack() {
    let memory = Memory::anonymous(4096).unwrap();
    let mut map = DmaMap::new();
    let stuck = map.pin();
    for _ in 0..200_000 {
        map.map(0, 4096, Some((memory.clone(), 0)), Prot::RW)
            .unwrap();
        let short = map.pin();
        map.unmap(0, 4096).unwrap();
        drop(short);
    }
    assert!(!map.quiesced());
    drop(stuck);
    assert!(map.quiesced());
    assert_eq!(Arc::strong_count(&memory.0), 1);
}
