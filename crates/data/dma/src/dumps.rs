//! Exclusion of memory from core dumps (madvise(2), `MADV_DONTDUMP`).

use rustix::mm::{Advice, madvise};
use std::ffi::c_void;

/// Size in bytes of the smallest page.
const PAGE: usize = 4096;

/// Excludes the pages that `value` lies on from core dumps of this process. Other data on these
/// pages is excluded, too: secrets get pages of their own.
pub fn exclude<T: ?Sized>(value: &T) {
    advise(value, Advice::LinuxDontDump);
}

/// Includes the pages of `value` in core dumps again, before the memory is used for other data.
pub fn include<T: ?Sized>(value: &T) {
    advise(value, Advice::LinuxDoDump);
}

fn advise<T: ?Sized>(value: &T, advice: Advice) {
    let len = size_of_val(value);
    let first = std::ptr::from_ref(value).cast::<u8>();
    let into_page = first.addr() % PAGE;
    let pages = (into_page + len).next_multiple_of(PAGE);
    if len == 0 {
        return;
    }
    // SAFETY: the advice changes nothing but the contents of core dumps; an address without a
    // mapping is an error of the call.
    let result = unsafe { madvise(first.wrapping_sub(into_page) as *mut c_void, pages, advice) };
    // A kernel without this advice dumps the pages; there is nothing else to be done.
    let _ = result;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;

    /// Returns the flags of the mapping that contains this address (proc(5), `VmFlags`).
    fn flags(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in maps.lines() {
            let range = line.split(' ').next().unwrap_or_default().split_once('-');
            let range = range.map(|(from, to)| [from, to].map(|n| usize::from_str_radix(n, 16)));
            if let Some([Ok(from), Ok(to)]) = range {
                inside = (from..to).contains(&address);
            }
            if inside && let Some(flags) = line.strip_prefix("VmFlags:") {
                return format!("{flags} ");
            }
        }
        String::new()
    }

    #[test]
    fn excluded_pages_are_marked_until_included() {
        let secret = Buffer::new(2 * PAGE);
        let at = secret.as_ptr().addr();
        assert!(!flags(at).contains(" dd "));
        exclude(&*secret);
        assert!(flags(at).contains(" dd ") && flags(at + PAGE).contains(" dd "));
        include(&*secret);
        assert!(!flags(at).contains(" dd "));
    }
}
