-- uses: readers
-- A reader has everything up to `at` where no crash takes it back. One that leaves holds the stream
-- no longer.
local row = reader(a.name) or {since_ms = NOW}
row.at, row.done, row.where, row.seen_ms, row.left = a.at, a.at, a.where, NOW, a.left or nil
keep_reader(a.name, row)
return cjson.encode({})
