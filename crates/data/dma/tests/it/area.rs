//! Structures with fields of different sizes.

use dma::{Access, Area, DmaError, DmaMap, Memory, Prot};

fn map(memory: &Memory) -> DmaMap {
    let mut map = DmaMap::new();
    map.map(0x1_0000, 0x4000, Some((memory.clone(), 0)), Prot::RW)
        .unwrap();
    map
}

#[test]
fn area_fields_are_little_endian() {
    let memory = Memory::anonymous(0x4000).unwrap();
    let map = map(&memory);
    let area = Area::resolve(&map, 0x1_0102, 30, 2, Access::Write).unwrap();
    area.store16(0, 0x1234);
    area.store32(2, 0x5566_7788);
    area.store16_release(28, 0xabcd);
    let mut bytes = [0; 30];
    memory.read(0x102, &mut bytes).unwrap();
    assert_eq!(bytes[..6], [0x34, 0x12, 0x88, 0x77, 0x66, 0x55]);
    assert_eq!(bytes[28..], [0xcd, 0xab]);
    assert_eq!(area.load16(0), 0x1234);
    assert_eq!(area.load16_acquire(28), 0xabcd);
    let pairs = Area::resolve(&map, 0x1_0108, 48, 8, Access::Read).unwrap();
    let low = 0x0102_0304_0506_0708u64;
    memory.write(0x118, &low.to_le_bytes()).unwrap();
    memory.write(0x120, &9u64.to_le_bytes()).unwrap();
    assert_eq!(pairs.load_pair64(16), [low, 9]);
}

#[test]
fn area_fields_are_accessed_by_index() {
    let memory = Memory::anonymous(0x4000).unwrap();
    let map = map(&memory);
    let bytes: Vec<u8> = (0..64).collect();
    memory.write(0x100, &bytes).unwrap();
    let area = Area::resolve(&map, 0x1_0100, 64, 8, Access::Write).unwrap();
    let fields = area.fields16(4, 30).unwrap();
    for index in 0..30 {
        assert_eq!(fields.load(index), Some(area.load16(4 + index * 2)));
    }
    assert_eq!(fields.load(30), None);
    let pairs = area.pairs64(0, 4).unwrap();
    for index in 0..4 {
        assert_eq!(pairs.load(index), Some(area.load_pair64(index * 16)));
    }
    assert_eq!(pairs.load(4), None);
    let stored = area.pairs32_mut(4, 7).unwrap();
    stored.store(1, [0x1122_3344, 0x5566_7788]);
    stored.store(7, [1, 2]);
    // Prefetches affect only speed, anywhere.
    for index in [0, 7, usize::MAX] {
        pairs.prefetch(index);
        stored.prefetch(index);
    }
    area.field16_mut(62).unwrap().store_release(0xaabb);
    let mut found = [0; 64];
    memory.read(0x100, &mut found).unwrap();
    let changed = [0x44, 0x33, 0x22, 0x11, 0x88, 0x77, 0x66, 0x55];
    assert_eq!(found[12..20], changed);
    assert_eq!(found[62..], [0xbb, 0xaa]);
    assert_eq!(
        (&found[..12], &found[20..62]),
        (&bytes[..12], &bytes[20..62])
    );
}

#[test]
fn invalid_area_fields_are_refused() {
    let memory = Memory::anonymous(0x4000).unwrap();
    let map = map(&memory);
    let area = Area::resolve(&map, 0x1_0100, 64, 8, Access::Write).unwrap();
    assert!(area.fields16(1, 1).is_none() && area.pairs64(4, 1).is_none());
    assert!(
        area.pairs32_mut(2, 1).is_none() && area.field16_mut(1).is_none(),
        "misaligned"
    );
    assert!(area.fields16(4, 31).is_none() && area.pairs64(16, 4).is_none());
    assert!(
        area.pairs32_mut(4, 8).is_none() && area.field16_mut(63).is_none(),
        "too long"
    );
    for huge in [usize::MAX, usize::MAX / 8] {
        assert!(area.fields16(0, huge).is_none() && area.pairs64(0, huge).is_none());
        assert!(area.pairs32_mut(0, huge).is_none() && area.fields16(huge, 1).is_none());
    }
    let readable = Area::resolve(&map, 0x1_0100, 64, 8, Access::Read).unwrap();
    assert!(readable.pairs64(0, 4).is_some() && readable.fields16(0, 32).is_some());
    assert!(
        readable.pairs32_mut(0, 8).is_none() && readable.field16_mut(0).is_none(),
        "read-only"
    );
}

#[test]
fn invalid_area_access_does_nothing() {
    let memory = Memory::anonymous(0x4000).unwrap();
    let map = map(&memory);
    memory.write(0, &[0xff; 0x1000]).unwrap();
    let area = Area::resolve(&map, 0x1_0100, 8, 8, Access::Write).unwrap();
    for offset in [7, 8, 9, usize::MAX] {
        area.store16(offset, 0);
        area.store32(offset, 0);
        assert_eq!(area.load16(offset), 0);
        assert_eq!(area.load_pair64(offset), [0; 2]);
    }
    // It ends outside, it is misaligned.
    area.store32(6, 0);
    area.store16(1, 0);
    let readable = Area::resolve(&map, 0x1_0100, 8, 8, Access::Read).unwrap();
    readable.store16(0, 0);
    readable.store32(0, 0);
    readable.store16_release(0, 0);
    assert_eq!(readable.load16(0), u16::MAX);
    assert_eq!(readable.load_pair64(0), [0; 2], "it has only 8 bytes");
    let mut bytes = [0; 0x1000];
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|b| *b == 0xff));
}

#[test]
fn invalid_area_is_refused() {
    let memory = Memory::anonymous(0x4000).unwrap();
    let map = map(&memory);
    let resolve = |iova, len, align| Area::resolve(&map, iova, len, align, Access::Write).err();
    assert_eq!(
        resolve(0x1_0001, 4, 2),
        Some(DmaError::Misaligned { iova: 0x1_0001 })
    );
    assert_eq!(resolve(0x1_0002, 4, 2), None);
    assert_eq!(
        resolve(0x1_0002, 4, 4),
        Some(DmaError::Misaligned { iova: 0x1_0002 })
    );
    assert_eq!(
        resolve(0x1_0000, 4, 3),
        Some(DmaError::Misaligned { iova: 0x1_0000 })
    );
    assert!(
        resolve(0x1_3ffe, 4, 2).is_some(),
        "it ends behind the window"
    );
    assert!(resolve(0, 4, 2).is_some());
    assert!(resolve(u64::MAX - 1, 4, 2).is_some());
    assert!(resolve(0x1_0000, 0, 2).is_some());
    assert!(resolve(0x1_0000, usize::MAX, 2).is_some());
}

#[test]
fn area_on_scattered_pages_is_contiguous() {
    let memory = Memory::anonymous(0x4000).unwrap();
    let mut map = DmaMap::new();
    for (page, offset) in [0x3000, 0x1000].into_iter().enumerate() {
        map.map(
            page as u64 * 0x1000,
            0x1000,
            Some((memory.clone(), offset)),
            Prot::RW,
        )
        .unwrap();
    }
    let area = Area::resolve(&map, 0, 0x2000, 4, Access::Write).unwrap();
    area.store32(0xffc, 1);
    area.store32(0x1000, 2);
    assert_eq!(area.load_pair64(0xff0), [0, 1 << 32]);
    assert_eq!(area.load_pair64(0x1000), [2, 0]);
    assert_eq!(area.load_pair64(0xff8), [0; 2], "not at a multiple");
    assert!(area.fields16(0xff0, 8).is_some() && area.fields16(0xff0, 9).is_none());
    let mut bytes = [0; 4];
    memory.read(0x3ffc, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 0, 0, 0]);
    memory.read(0x1000, &mut bytes).unwrap();
    assert_eq!(bytes, [2, 0, 0, 0]);
    assert!(Area::resolve(&map, 4, 0x1ffc, 4, Access::Write).is_err());
}
