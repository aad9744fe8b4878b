//! Return of released memory to the system.

use crate::{Memory, PrivateMemory};

const MIB: u64 = 1 << 20;

/// Returns the number of resident pages of the range, by mincore(2).
fn resident(memory: &PrivateMemory, offset: u64, len: u64) -> usize {
    let ptr = memory.at(offset, len).unwrap();
    let mut pages = vec![0u8; len as usize / rustix::param::page_size()];
    // SAFETY: asks about a mapped range that starts at a page, and has a
    // byte for each of its pages.
    let result = unsafe { libc::mincore(ptr.cast(), len as usize, pages.as_mut_ptr()) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    pages.iter().filter(|&&page| page & 1 != 0).count()
}

#[test]
fn released_memory_returns_to_system() {
    let len = 8 * MIB as usize;
    released(PrivateMemory::new(len).unwrap());
    released(PrivateMemory::kept(len, None).unwrap());
}

fn released(memory: PrivateMemory) {
    let place = Memory::anonymous(8 * MIB as usize).unwrap();
    let whole = place.segments(0, 8 * MIB as usize).unwrap();
    assert_eq!(memory.copy_in(0, whole.view()), 8 * MIB);
    let page = rustix::param::page_size();
    let pages = |len: u64| len as usize / page;
    assert_eq!(resident(&memory, 0, 8 * MIB), pages(8 * MIB));
    // From within a page to within another: both stay.
    assert_eq!(memory.release(3 * MIB - 10, 2 * MIB + 20), 2 * MIB + 20);
    assert_eq!(resident(&memory, 3 * MIB, 2 * MIB), 0);
    assert_eq!(resident(&memory, 0, 3 * MIB), pages(3 * MIB));
    assert_eq!(resident(&memory, 5 * MIB, 3 * MIB), pages(3 * MIB));
}

/// Returns the number of bytes at this address that are mapped by huge pages of memory files.
fn huge(memory: &PrivateMemory) -> u64 {
    let start = format!("{:x}-", memory.at(0, 1).unwrap().addr());
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let lines = maps.lines().skip_while(|line| !line.starts_with(&start));
    let mut lines = lines.skip_while(|line| !line.starts_with("ShmemPmdMapped:"));
    let kilobytes = lines.next().and_then(|line| line.split_whitespace().nth(1));
    kilobytes
        .and_then(|text| text.parse::<u64>().ok())
        .unwrap_or(0)
        * 1024
}

#[test]
fn kept_memory_has_huge_pages_where_written() {
    let memory = PrivateMemory::kept(32 * MIB as usize, None).unwrap();
    let page = Memory::anonymous(4096).unwrap();
    page.write(0, &[7; 4096]).unwrap();
    let segments = page.segments(0, 4096).unwrap();
    for at in [0, 9 * MIB, 31 * MIB] {
        assert_eq!(memory.copy_in(at, segments.view()), 4096);
    }
    let before = huge(&memory);
    if memory.collapse(2) == 0 && before == 0 {
        return testkit::skip("dma: huge pages of memory files", "this kernel makes none");
    }
    memory.collapse(usize::MAX);
    assert_eq!(huge(&memory), 6 * MIB);
    assert_eq!(memory.collapse(usize::MAX), 0, "they are there");
    for at in [0, 9 * MIB, 31 * MIB] {
        page.write(0, &[0; 4096]).unwrap();
        assert_eq!(memory.copy_out(at, segments.view()), 4096);
        let mut found = [0; 4096];
        page.read(0, &mut found).unwrap();
        assert_eq!(found, [7; 4096]);
    }
    // A released piece can become a huge page again.
    assert_eq!(memory.release(8 * MIB, 2 * MIB), 2 * MIB);
    assert_eq!(huge(&memory), 4 * MIB);
    assert_eq!(memory.copy_in(9 * MIB, segments.view()), 4096);
    assert_eq!(memory.collapse(usize::MAX), 1);
}

#[test]
fn private_memory_starts_at_huge_page() {
    let memory = PrivateMemory::new(5).unwrap();
    assert!(
        memory
            .at(0, 5)
            .unwrap()
            .addr()
            .is_multiple_of(2 * MIB as usize)
    );
}

#[test]
fn reserved_memory_stays_allocated() {
    let pages = match testkit::huge::HugePages::add(2) {
        Ok(pages) => pages,
        Err(why) => return testkit::skip("dma::huge", why),
    };
    let free = pages.free();
    let memory = PrivateMemory::reserved(4 * MIB as usize, None).unwrap();
    assert_eq!(pages.free(), free - 2);
    let place = Memory::anonymous(4 * MIB as usize).unwrap();
    place.write(0, &[7; 4 << 20]).unwrap();
    let whole = place.segments(0, 4 << 20).unwrap();
    assert_eq!(memory.copy_in(0, whole.view()), 4 * MIB);
    assert_eq!(memory.release(2 * MIB, 2 * MIB), 2 * MIB);
    assert_eq!(pages.free(), free - 2);
    assert_eq!(memory.copy_out(0, whole.view()), 4 * MIB);
    let mut found = vec![0; 4 << 20];
    place.read(0, &mut found).unwrap();
    let (kept, released) = found.split_at(2 << 20);
    assert!(kept.iter().all(|byte| *byte == 7) && released.iter().all(|byte| *byte == 0));
}
