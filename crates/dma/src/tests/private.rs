//! Whether memory that was given up is returned to the system.

use crate::{Memory, PrivateMemory};

const MIB: u64 = 1 << 20;

/// Pages of the range that are in memory, by mincore(2).
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
fn what_is_released_goes_back_to_the_system() {
    let memory = PrivateMemory::new(8 * MIB as usize).unwrap();
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

#[test]
fn it_starts_where_a_huge_page_can() {
    let memory = PrivateMemory::new(5).unwrap();
    assert!(
        memory
            .at(0, 5)
            .unwrap()
            .addr()
            .is_multiple_of(2 * MIB as usize)
    );
}
