//! Reader of the parts of ELF files that the harness needs: the libraries of a program, and a
//! kernel module's `.modinfo`. 64-bit little-endian only, as in Debian's amd64 packages.

/// Program header and dynamic section tags (System V ABI, chapter 5).
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;

/// A parsed view of a file's bytes; every accessor checks its bounds and answers
/// `None` for a file that lies.
#[derive(Clone, Copy, Debug)]
pub struct Elf<'a> {
    bytes: &'a [u8],
}

impl<'a> Elf<'a> {
    /// Accepts a 64-bit little-endian ELF file.
    pub fn parse(bytes: &'a [u8]) -> Option<Elf<'a>> {
        bytes
            .starts_with(b"\x7fELF\x02\x01")
            .then_some(Elf { bytes })
    }

    /// The names in `DT_NEEDED`: the libraries that this file links with.
    /// Empty for a static program.
    pub fn needed(&self) -> Option<Vec<String>> {
        let mut segments = Vec::new();
        let mut dynamic = None;
        let table = self.u64(32)?;
        for i in 0..u64::from(self.u16(56)?) {
            let at = table.checked_add(i.checked_mul(u64::from(self.u16(54)?))?)?;
            let (kind, offset, vaddr, size) = (
                self.u32(at)?,
                self.u64(at + 8)?,
                self.u64(at + 16)?,
                self.u64(at + 32)?,
            );
            match kind {
                PT_LOAD => segments.push((vaddr, offset, size)),
                PT_DYNAMIC => dynamic = Some((offset, size)),
                _ => {}
            }
        }
        let Some((offset, size)) = dynamic else {
            return Some(Vec::new());
        };
        let (mut names, mut strtab) = (Vec::new(), None);
        for i in 0..size / 16 {
            let at = offset.checked_add(i * 16)?;
            let (tag, value) = (self.u64(at)?, self.u64(at + 8)?);
            match tag {
                0 => break,
                DT_NEEDED => names.push(value),
                DT_STRTAB => strtab = Some(value),
                _ => {}
            }
        }
        // DT_STRTAB is an address; find the segment that loads it.
        let strtab = strtab?;
        let (vaddr, file, _) = *segments
            .iter()
            .find(|(v, _, s)| strtab.checked_sub(*v).is_some_and(|distance| distance < *s))?;
        let strtab = (strtab - vaddr).checked_add(file)?;
        names
            .into_iter()
            .map(|name| self.string(strtab.checked_add(name)?))
            .collect()
    }

    /// The bytes of a named section.
    pub fn section(&self, name: &str) -> Option<&'a [u8]> {
        let (table, entry) = (self.u64(40)?, u64::from(self.u16(58)?));
        let header = |i: u16| table.checked_add(u64::from(i).checked_mul(entry)?);
        let names = self.u64(header(self.u16(62)?)?.checked_add(24)?)?;
        for i in 0..self.u16(60)? {
            let at = header(i)?;
            let section = names.checked_add(u64::from(self.u32(at)?))?;
            if self.string(section).as_deref() == Some(name) {
                return self.slice(self.u64(at + 24)?, self.u64(at + 32)?);
            }
        }
        None
    }

    fn slice(&self, at: u64, len: u64) -> Option<&'a [u8]> {
        let start = usize::try_from(at).ok()?;
        let end = start.checked_add(usize::try_from(len).ok()?)?;
        self.bytes.get(start..end)
    }

    fn u16(&self, at: u64) -> Option<u16> {
        Some(u16::from_le_bytes(self.slice(at, 2)?.try_into().ok()?))
    }

    fn u32(&self, at: u64) -> Option<u32> {
        Some(u32::from_le_bytes(self.slice(at, 4)?.try_into().ok()?))
    }

    fn u64(&self, at: u64) -> Option<u64> {
        Some(u64::from_le_bytes(self.slice(at, 8)?.try_into().ok()?))
    }

    fn string(&self, at: u64) -> Option<String> {
        let rest = self.bytes.get(usize::try_from(at).ok()?..)?;
        let end = rest.iter().position(|b| *b == 0)?;
        String::from_utf8(rest.get(..end)?.to_vec()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_program_needs_libc() {
        let bytes = std::fs::read("/proc/self/exe").unwrap();
        let elf = Elf::parse(&bytes).unwrap();
        let needed = elf.needed().unwrap();
        assert!(
            needed.iter().any(|n| n.starts_with("libc.so")),
            "{needed:?}"
        );
        assert!(elf.section(".text").is_some_and(|text| text.len() > 1000));
        assert!(elf.section(".no-such-section").is_none());
    }

    #[test]
    fn truncated_elf_is_refused() {
        let bytes = std::fs::read("/proc/self/exe").unwrap();
        for len in [0, 6, 40, 64, 200] {
            let cut = &bytes[..len];
            if let Some(elf) = Elf::parse(cut) {
                assert!(elf.needed().is_none());
                assert!(elf.section(".text").is_none());
            }
        }
    }
}
