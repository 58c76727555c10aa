-- Commands on the server, on any key, and on strings and lists.
local parts = ...

local add_to_counter, command = parts.add_to_counter, parts.command
local exists, expire, value = parts.exists, parts.expire, parts.value
local fail, fail_unsupported = parts.fail, parts.fail_unsupported
local parse_integer = parts.parse_integer
local floor, format, max, min, upper = math.floor, string.format, math.max, math.min, string.upper

command('PING', 1, 'o', function() return {ok = 'PONG'} end)

command('TIME', 1, '', function(space)
  local seconds = floor(space.micros / 1000000)
  return {format('%d', seconds), format('%d', space.micros - seconds * 1000000)}
end)

command('FLUSHALL', 1, 'wo', function(space)
  space.keys, space.expiring, space.first, space.last = {}, {}, 1, 0
  return {ok = 'OK'}
end)

command('DBSIZE', 1, 'o', function(space)
  local found = 0
  for key in pairs(space.keys) do
    if exists(space, key) then found = found + 1 end
  end
  return found
end)

command('KEYS', 2, 'o', function(space, args)
  local prefix, rest = string.match(args[2], '^([^*?%[]*)(.*)$')
  if rest ~= '*' then fail_unsupported('KEYS with ' .. args[2]) end
  local found = {}
  for key in pairs(space.keys) do
    if string.sub(key, 1, #prefix) == prefix and exists(space, key) then found[#found + 1] = key end
  end
  return found
end)

command('EXISTS', -2, '', function(space, args, n)
  local found = 0
  for i = 2, n do
    if exists(space, args[i]) then found = found + 1 end
  end
  return found
end)

command('DEL', -2, 'w', function(space, args, n)
  local found, keys = 0, space.keys
  for i = 2, n do
    if exists(space, args[i]) then found = found + 1 end
    keys[args[i]] = nil
  end
  return found
end)

command('PEXPIRE', 3, 'w', function(space, args)
  local ttl_ms = parse_integer(args[3])
  if not exists(space, args[2]) then return 0 end
  if ttl_ms <= 0 then fail_unsupported('PEXPIRE that ends a key') end
  expire(space, args[2], space.keys[args[2]], space.now_ms + ttl_ms)
  return 1
end)

command('GET', 2, '', function(space, args)
  local found = value(space, args[2], 'string')
  return found and found.text or false
end)

command('SET', -3, 'wm', function(space, args, n)
  local ttl_ms, only_new = nil, false
  local i = 4
  while i <= n do
    local option = upper(args[i])
    if option == 'NX' then
      only_new = true
    elseif option == 'PX' and i < n and not ttl_ms then
      i = i + 1
      ttl_ms = parse_integer(args[i])
      if ttl_ms <= 0 then fail("ERR invalid expire time in 'set' command") end
    else
      fail_unsupported('SET with ' .. args[i])
    end
    i = i + 1
  end
  local key = args[2]
  if only_new and exists(space, key) then return false end
  local new = {kind = 'string', text = args[3]}
  space.keys[key] = new
  if ttl_ms then expire(space, key, new, space.now_ms + ttl_ms) end
  return {ok = 'OK'}
end)

command('INCR', 2, 'wm', function(space, args)
  local found = value(space, args[2], 'string')
  if not found then
    found = {kind = 'string', text = '0'}
    space.keys[args[2]] = found
  end
  found.text = add_to_counter(parse_integer(found.text), 1)
  return tonumber(found.text)
end)

-- Lists: items[first .. last].

command('RPUSH', -3, 'wm', function(space, args, n)
  local list = value(space, args[2], 'list')
  if not list then
    list = {kind = 'list', items = {}, first = 1, last = 0}
    space.keys[args[2]] = list
  end
  for i = 3, n do
    list.last = list.last + 1
    list.items[list.last] = args[i]
  end
  return list.last - list.first + 1
end)

command('LPOP', -2, 'w', function(space, args, n)
  if n > 2 then fail_unsupported('LPOP with a count') end
  local list = value(space, args[2], 'list')
  if not list then return false end
  local item = list.items[list.first]
  list.items[list.first] = nil
  list.first = list.first + 1
  if list.first > list.last then space.keys[args[2]] = nil end
  return item
end)

-- Returns the value and the indices args[3] and args[4], limited to its length. Indices start at 0;
-- negative indices count from the end. The key is read after the numbers are parsed, as in Redis.
function parts.resolve_range(space, args, kind, count_items)
  local start, stop = parse_integer(args[3]), parse_integer(args[4])
  local found = value(space, args[2], kind)
  local length = found and count_items(found) or 0
  if start < 0 then start = max(start + length, 0) end
  if stop < 0 then stop = stop + length end
  return found, start, min(stop, length - 1)
end

local function count_items(list) return list.last - list.first + 1 end

command('LRANGE', 4, '', function(space, args)
  local list, start, stop = parts.resolve_range(space, args, 'list', count_items)
  local found = {}
  for place = start, stop do found[#found + 1] = list.items[list.first + place] end
  return found
end)
